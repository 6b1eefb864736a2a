"""C6: HSDP by torch's FSDP2 over gloo: what comes of streaming its shards."""

from rank_kit import pool


def test_C6_shards_of_fsdp2_are_refused_with_the_reason_and_the_model_goes_on() -> None:
    with pool(2, "serve_hsdp()") as ranks:
        for line in ranks.lines():
            assert line.startswith("True True unsupported")
            assert "storage of its own" in line
            assert "'first.0." in line
