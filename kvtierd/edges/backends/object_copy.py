"""Copies from a read-only buffer into the pool without holding the GIL.

Assignment to a memoryview's slice holds it for the whole copy (0.2 ms per MiB), ctypes' ``memmove`` does not;
but ctypes gives no address of a read-only buffer, so that is asked of CPython (PEP 3118).
"""

from __future__ import annotations

import ctypes

_SMALL = 16 << 10


class _View(ctypes.Structure):
    """``Py_buffer`` of CPython's ABI (part of the stable one since 3.11)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_View),)
_release_buffer.restype = None


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy all of ``source`` to ``target``, which is writable and as long; both are contiguous bytes."""
    size = len(source)
    if len(target) != size or not (target.c_contiguous and source.c_contiguous) or target.readonly:
        raise ValueError("copy between buffers that do not fit")
    if size <= _SMALL:
        target[:] = source
        return
    view = _View()
    _get_buffer(source, ctypes.byref(view), 0)  # raises what CPython raised
    try:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), view.buf, size)
    finally:
        _release_buffer(ctypes.byref(view))
