"""What a resident block weighs, by what Python itself counts, so that it is the same on every machine."""

from kvtierd.cli.bench_scale import TOKENS, held_by_a_block

BLOCKS = 20_032


def test_a_resident_block_takes_450_bytes_and_a_token_of_it_about_5():
    """Index, metadata and policy of one block as it came off the wire; ids of up to 100,000.

    The packed ids' own object is in the figure for a token: 36 bytes for all 16 of them.
    """
    bare = held_by_a_block(BLOCKS)
    assert bare <= 450, "bytes a block"
    assert (held_by_a_block(BLOCKS, tokens=True) - bare) / TOKENS <= 6.5, "bytes a token"
