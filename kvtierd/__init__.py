"""kvtierd: the KV-cache tier daemon that runs beside an LLM inference engine."""

__version__ = "0.1.0"
