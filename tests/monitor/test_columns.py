"""The columns of a rollout dump: each sequence gets its own, or the reason why there are none.

Contract: columns come back under the sequences' keys in whatever order they are asked for. The response mask is the one
before rejection where it was kept. Fields that do not fit together are refused, never cut or filled up.
"""

from __future__ import annotations

import json
import math

import pytest

from verl_rounding_align.monitor import COLUMNS, DumpColumns, Missing

KEYS = ["a", "b"]
FIELDS = dict(
    rollout_log_probs=[[-1.0, -2.0], [-3.0]],
    trainer_log_probs=[[-1.5, -2.5], [-3.5]],
    response_ids=[[5, 6], [7]],
    prompt_length=[3, 9],
    advantages=[[0.5, 0.5], [-0.5]],
)
LOSS = [[True, False], [True]]


def filled(**change) -> DumpColumns:
    columns = DumpColumns()
    columns.fill(KEYS, loss_mask=LOSS, **{**FIELDS, **change})
    return columns


def test_each_sequence_gets_its_own_columns_in_the_order_asked_for():
    found = filled().join(["b", "a"])
    assert list(found) == list(COLUMNS)
    assert found["rollout_log_probs"] == [[-3.0], [-1.0, -2.0]] and found["prompt_length"] == [9, 3]
    assert found["loss_mask"] == [[1], [1, 0]] and found["loss_mask"][0][0] is not True  # numbers for JSON
    assert filled().join(KEYS) != found  # control


def test_the_response_mask_is_the_one_before_rejection_where_it_was_kept():
    columns = DumpColumns()
    columns.keep_masks(["a"], [[True, True]])
    columns.fill(KEYS, loss_mask=LOSS, **FIELDS)
    found = columns.join(KEYS)
    assert (found["response_mask"], found["loss_mask"]) == ([[1, 1], [1]], [[1, 0], [1]])
    assert filled().join(KEYS)["response_mask"] == [[1, 0], [1]]  # control: not kept


def test_columns_that_are_not_given_are_left_out():
    columns = DumpColumns()
    columns.fill(KEYS, loss_mask=LOSS)
    assert list(columns.join(KEYS)) == ["response_mask", "loss_mask"]


def test_log_probs_that_are_not_finite_stay_as_they_are():
    found = filled(trainer_log_probs=[[math.nan, -math.inf], [0.0]]).join(["a"])
    assert json.dumps(found["trainer_log_probs"]) == "[[NaN, -Infinity]]"


def test_fields_of_different_length_are_refused():
    with pytest.raises(Missing) as error:
        filled(advantages=[[0.5, 0.5], [-0.5, 0.5]])
    assert str(error.value) == (
        "the fields of sequence b differ in length: {'rollout_log_probs': 1, 'trainer_log_probs': 1, 'response_mask': 1, "
        "'loss_mask': 1, 'response_ids': 1, 'advantages': 2}"
    )


def test_fields_without_one_entry_per_sequence_are_refused():
    with pytest.raises(Missing) as error:
        filled(prompt_length=[3])
    assert str(error.value) == (
        "the fields do not have one entry for each of 2 sequences: {'rollout_log_probs': 2, 'trainer_log_probs': 2, "
        "'response_ids': 2, 'prompt_length': 1, 'advantages': 2, 'loss_mask': 2}"
    )


def test_rows_that_are_not_the_batchs_are_refused():
    with pytest.raises(Missing) as error:
        filled().join(["a", "c"])
    assert str(error.value) == "its rows are not the batch's sequences: c"


@pytest.mark.parametrize("name", ["log_probs", "response_mask"])
def test_only_columns_of_the_table_can_be_filled_in(name):
    with pytest.raises(TypeError) as error:
        filled(**{name: LOSS})
    assert str(error.value) == f"no column of a dump: {name}"


def test_nothing_is_kept_once_cleared_and_nothing_is_shared():
    columns, other = filled(), DumpColumns()
    assert columns and not other
    columns.clear()
    assert not columns and columns.join([]) == {}


def test_a_refused_step_leaves_no_columns_of_the_step_before():
    columns = filled()
    with pytest.raises(Missing):
        columns.fill(["c"], loss_mask=LOSS)
    assert not columns
