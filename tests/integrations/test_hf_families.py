"""The table of transformers' families has all families and agrees with their results on this library."""

from __future__ import annotations

import pytest

from tests.integrations.hf_families import classes, read_table, row_of

transformers = pytest.importorskip("transformers")

# Families with the same code in transformers 5.17 and 5.23, at least one for each reason.
SAMPLE = [
    *["bert", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss", "llama"],
    *["mistral", "mixtral", "olmo2", "phi3", "phimoe", "qwen2", "qwen3_moe", "smollm3"],
    *["bart", "bloom", "blt", "falcon", "persimmon", "jamba", "llama4_text", "roberta", "stablelm"],
]


def test_the_table_has_every_family_of_its_version() -> None:
    version, rows = read_table()
    if version == transformers.__version__:
        assert {family: row.model for family, row in rows.items()} == classes()
    assert sum(row.status == "works" for row in rows.values()) >= 85
    refusals = {row.reason for row in rows.values() if row.status == "refused"}
    assert {rows[family].reason for family in SAMPLE} >= refusals


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_does_what_the_table_says(family: str) -> None:
    _, rows = read_table()
    assert row_of(family) == rows[family]
