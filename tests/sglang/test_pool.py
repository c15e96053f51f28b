"""SGLang's KV pool with a flow's fields, written the ways SGLang writes it."""

import pytest


@pytest.fixture
def answer(objects):
    return objects["pool"]


def test_summaries_follow_chunks_decode_tokens_and_reuse(answer):
    assert answer["chunks"] == {"worst": 0.0, "other layer": 0.0}


def test_float8_summaries_are_descaled(answer):
    # a summary is stored in bfloat16: half a unit of its 8 bits of mantissa, for any scale
    assert max(answer["float8"]) <= 2**-8


def test_float8_bounds_lie_outside_of_the_keys_and_take_a_byte_an_element(answer):
    said = answer["summaries"]
    assert said["inside"] >= 0.0
    assert said["outside"] <= 2**-3, "a code's step is at most an eighth of its value"
    assert said["bytes"] == [2 * 8 * 2 * 64, 2 * 8 * 2 * 64]
    assert said["scales"] == {"1": [0.25, 0.25]}
    assert said["saturated"] == 0


def test_writes_that_would_leave_the_fields_behind_are_refused(answer):
    said = answer["refused"]
    assert said["prefix"].startswith("set_kv_buffer_prefix_valid: speculative writes leave the flow's fields behind")
    assert said["move"].startswith("move_kv_cache: ")
    assert said["load"].startswith("load_cpu_copy: ")
    assert "under another layer's id" in said["other id"]
    assert "layer 0 has an fp8 k_scale of 2.0" in said["lost scale"]


def test_pools_of_another_layout_are_refused(answer):
    said = answer["layouts"]
    assert said["hnd"].startswith("SGLang's KV pool has the layout 'hnd', a flow reads 'nhd'")
    assert said["vectorised"].startswith("SGLang's KV pool has the layout 'vectorized_5d'")
    assert said["page major"].startswith("SGLang's KV pool has the layout 'page_major_layer_major'")
    assert said["quantised"].startswith("SGLang's KV pool is block-quantised")
    assert said["size"] == "SGLang's KV pool has 125 tokens, expected a multiple of 16"
    assert "(16, 1, 64, 64, torch.bfloat16), expected (16, 2, 64, 64, torch.bfloat16)" in said["heads"]


def test_keys_written_inside_rope_go_through_the_pool_or_are_refused(answer):
    assert answer["fused"]["stock"] == [True, None]
    enabled, said = answer["fused"]["flow"]
    assert not enabled
    assert said.startswith("this model writes K and V inside its RoPE kernel")


def test_the_budget_is_told_what_the_fields_take(answer):
    memory = answer["memory"]
    assert memory["layers"] == [1], "dense layers keep no fields"
    assert 0 < memory["fields"] <= memory["told"]
