"""What tells one request's blocks from another's: salts, adapters, pictures and tenants."""

from __future__ import annotations

from itertools import combinations, product

from fake_session import FakeSession
from glue_rig import identity, keys_of, manager, prepare_load, prepare_store, request, tracked
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import Request

from kvtierd.core.model import BlockKey, KeyState
from kvtierd.engines.vllm.scope import RequestScope
from kvtierd.engines.vllm.versions import SALTS_MAY_NAME_ADAPTERS

BLOCK = 4
ADAPTERS = (None, "a", "a|b", "b", "b|c")
SALTS = (None, "a", "a|b", "b|c", "c", "picture")
PICTURES = (None, "a", "picture")


def hashes(adapter, salt, picture):
    """The hashes of two blocks of the same tokens, by vLLM."""
    position = PlaceholderRange(offset=1, length=2)
    feature = MultiModalFeatureSpec(data=None, modality="image", identifier=picture, mm_position=position)
    made = Request(
        request_id="r",
        prompt_token_ids=list(range(2 * BLOCK)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[feature] if picture else None,
        lora_request=LoRARequest(adapter, 1 + ADAPTERS.index(adapter), f"/adapters/{adapter}")
        if adapter
        else None,
        cache_salt=salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
    )
    return made.block_hashes


def check_no_two_requests_with_other_extra_keys_share_a_block():
    """L128: in every combination, empty ones too; but for what an old vLLM cannot tell apart (below)."""
    kv_cache_utils.init_none_hash(sha256)
    found = {who: hashes(*who) for who in product(ADAPTERS, SALTS, PICTURES)}
    for (one, left), (other, right) in combinations(found.items(), 2):
        shared = set(left) & set(right)
        salts_and_adapters = {one[:2], other[:2]}
        alike = any(salts_and_adapters == {(name, None), (None, name)} for name in SALTS[1:])
        if alike and one[2] is other[2] is None and SALTS_MAY_NAME_ADAPTERS:
            assert len(shared) == 1, (
                one,
                other,
            )  # the second block's extra keys have the adapter and no salt
        else:
            assert not shared, (one, other)


def check_a_salt_that_may_be_an_adapters_name_keeps_a_request_out_of_the_cache():
    """L128: neither reads nor writes what an adapter's requests have; salts with an adapter are safe."""
    for salt, adapter, served in (
        ("a", None, False),
        (None, "a", True),
        ("a", "a", True),
        (None, None, True),
    ):
        session, req = FakeSession(), request(2)
        session.states = {BlockKey(key): KeyState.HIT for key in keys_of(req)[:1]}
        req.cache_salt = salt
        req.lora_request = LoRARequest(adapter, 1, "/a") if adapter else None
        made, _ = manager(session, identity(salts_collide=True))
        context = tracked(made, req)
        assert (made.lookup(keys_of(req)[0], context) is LookupResult.HIT) == served
        assert bool(prepare_store(made, keys_of(req), context).keys_to_store) == served
        assert ("salt" in made.problem("r")) != served
        assert bool(session.asked) == served
    made, _ = manager(FakeSession(), identity())
    req = request(1)
    req.cache_salt = "a"
    tracked(made, req)
    assert made.problem("r") == "", "without adapters there is nothing that a salt could name"


def check_a_request_cannot_name_a_tenant():
    """L131: not among its own parameters, and its engine's is in the namespace whatever it says."""
    for params in (
        {"kvtierd": {"tenant": "b"}},
        {"kvtierd": {"namespace": "b"}},
        {"kvtierd": {"layout": {}}},
    ):
        assert "unknown" in RequestScope.of(params).problem
    session, req = FakeSession(), request(1, kv_transfer_params={"tenant": "b", "kvtierd_tenant": "b"})
    session.states = {BlockKey(key): KeyState.HIT for key in keys_of(req)}
    made, _ = manager(session)
    context = tracked(made, req)
    spec = prepare_load(made, keys_of(req), context)
    assert spec.namespace == identity().layout.namespace()
