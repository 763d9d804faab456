"""Averages of (sum, weight) pairs, and log files that survive kills and resumes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from train.log import RunLog, average_metrics

RECORD = {"loss/total": 1.5, "speed/tokens_per_s": 10.0, "optimizer/skipped_steps": 0.0}


def test_a_window_is_the_sum_of_values_over_the_sum_of_weights():
    """M08 over steps: 3 tokens with mean 1 and 1 with mean 5 average to 2, not to 3."""
    first = {"x": (3.0, 3.0), "slots": (np.array([1.0, 0.0]), np.array([2.0, 4.0]))}
    second = {"x": (5.0, 1.0), "slots": (np.array([1.0, 4.0]), np.array([2.0, 4.0]))}
    assert average_metrics([first, second]) == {"x": 2.0, "slots/slot01": 0.5, "slots/slot02": 0.5}


def test_what_weighs_nothing_is_left_out_not_shown_as_zero():
    """A loss of 0.0 on the curve would look like a perfect step."""
    window = [{"loss/total": (0.0, 0.0), "slots": (np.array([1.0, 0.0]), np.array([2.0, 0.0]))}]
    assert average_metrics(window) == {"slots/slot01": 0.5}


def steps(workdir) -> list[int]:
    return [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def write(workdir, start, numbers, total=10):
    log = RunLog(workdir, start_step=start, total_steps=total)
    for step in numbers:
        log.advance()
        log.write(step, RECORD)
    log.close()


def test_a_resumed_log_has_each_step_once(tmp_path):
    """Records past the checkpoint that is resumed are computed again, so the old ones go."""
    write(tmp_path, 0, [1, 2, 3, 4, 5])
    write(tmp_path, 3, [4, 5, 6])
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_half_a_line_left_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, 0, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    write(tmp_path, 3, [4])
    assert steps(tmp_path) == [1, 2, 4]
    assert not list(tmp_path.glob("*.tmp"))


def test_skipped_steps_show_on_the_console_line(tmp_path, capsys):
    log = RunLog(tmp_path, start_step=0, total_steps=1)
    log.write(1, RECORD | {"optimizer/skipped_steps": 2.0})
    log.message("a line of its own")
    log.advance()
    log.close()
    error = capsys.readouterr().err
    assert "skipped 2" in error and "a line of its own" in error


def test_a_window_of_skipped_steps_alone_can_be_written(tmp_path):
    log = RunLog(tmp_path, start_step=0, total_steps=1)
    log.write(1, {"speed/tokens_per_s": 10.0, "optimizer/skipped_steps": 1.0})
    log.close()
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("start", [0, 2])
def test_every_number_reads_back_as_json(tmp_path, start):
    write(tmp_path, start, [start + 1])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": start + 1} | RECORD
