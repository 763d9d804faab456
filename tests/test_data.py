"""Dataset folders, the grain pipeline and the converter."""

import contextlib
import hashlib
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dspine_jax.config import DataConfig
from train import convert
from train.data import (
    DatasetFolder,
    Manifest,
    count_supervised,
    make_iterator,
    pad_rows,
    rows_holding,
    skip_reason,
    token_frequencies,
    trainable_rows,
    write_dataset,
)

ROWS, WIDTH, VOCAB = 97, 12, 50


def _arrays(rows=ROWS, width=WIDTH, seed=0):
    """Rows of 4..width tokens, prompt of 2, the rest answer."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, width + 1, rows).astype(np.int32)
    column = np.arange(width)[None]
    tokens = np.where(column < lengths[:, None], rng.integers(1, VOCAB, (rows, width)), 0)
    mask = ((column >= 2) & (column < lengths[:, None])).astype(np.uint8)
    return tokens, mask, lengths


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "set", *_arrays(), Manifest(name="set", source="random"))
    return DatasetFolder(tmp_path / "set", VOCAB)


def _take(iterator, batches):
    return [next(iterator) for _ in range(batches)]


def _ids(batches):
    return np.concatenate([batch["row_ids"] for batch in batches])


# --- folders ----------------------------------------------------------------


def test_folder_round_trip(tmp_path):
    tokens, mask, lengths = _arrays()
    about = Manifest(name="a", source="b", target="t.gguf", template_mode="thinking", tokenizer="tok", tokenizer_sha256="00", skipped={"no answer tokens": 2})
    written = write_dataset(tmp_path / "x" / "set", tokens, mask, lengths, about)
    folder = DatasetFolder(tmp_path / "x" / "set", VOCAB)
    assert folder.manifest == written and (written.rows, written.width, written.skipped, written.name) == (ROWS, WIDTH, {"no answer tokens": 2}, "a")
    assert (folder.num_rows, folder.width) == (ROWS, WIDTH)
    assert isinstance(folder.tokens, np.memmap) and (folder.tokens.dtype, folder.loss_mask.dtype, folder.lengths.dtype) == (np.uint16, np.uint8, np.int32)
    for found, expected in ((folder.tokens, tokens), (folder.loss_mask, mask), (folder.lengths, lengths)):
        np.testing.assert_array_equal(found, expected)
    assert sorted(path.name for path in folder.path.iterdir()) == ["lengths.npy", "loss_mask.npy", "manifest.json", "tokens.npy"]


def test_large_ids_take_uint32(tmp_path):
    tokens, mask, lengths = _arrays(3)
    tokens[0, 0] = 151_668
    write_dataset(tmp_path / "set", tokens, mask.astype(bool), lengths, Manifest(name="a", source="b"))
    folder = DatasetFolder(tmp_path / "set", 151_669)
    assert folder.tokens.dtype == np.uint32 and folder.tokens[0, 0] == 151_668


def test_pickled_folder_carries_no_arrays(folder):
    text = pickle.dumps(folder)
    assert len(text) < 4000
    np.testing.assert_array_equal(pickle.loads(text).tokens, folder.tokens)


def test_counts(folder):
    tokens, mask, _ = _arrays()
    frequencies = token_frequencies(folder, VOCAB)
    assert frequencies.dtype == np.float64 and frequencies.shape == (VOCAB,)
    for token in range(VOCAB):
        assert frequencies[token] == ((tokens == token) & (mask == 1)).sum()
    assert count_supervised(folder) == mask.sum() == frequencies.sum()
    with pytest.raises(ValueError, match="token id 49 is outside a vocabulary of 49"):
        token_frequencies(folder, 49)


def test_rows_that_hold_a_token_before_their_end_are_counted(tmp_path):
    tokens, mask = np.array([[5, 3, 0], [5, 5, 3], [3, 5, 5]]), np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1]])
    write_dataset(tmp_path / "d", tokens, mask, np.array([2, 2, 3]), Manifest(name="d", source="s"))
    folder = DatasetFolder(tmp_path / "d")
    assert [rows_holding(folder, token) for token in (3, 5, 0)] == [2, 3, 0]  # the 3 and the 0 past a row's end do not count


def test_overwrite_is_asked_for(folder):
    tokens, mask, lengths = _arrays(5)
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        write_dataset(folder.path, tokens, mask, lengths, Manifest(name="a", source="b"))
    assert DatasetFolder(folder.path).num_rows == ROWS
    write_dataset(folder.path, tokens, mask, lengths, Manifest(name="a", source="b"), overwrite=True)
    assert DatasetFolder(folder.path).num_rows == 5 and (folder.path / "notes.txt").read_text() == "mine"


def _edit_manifest(path, **changes):
    data = json.loads((path / "manifest.json").read_text())
    data.update(changes)
    (path / "manifest.json").write_text(json.dumps(data))


def _flip_last_byte(file):
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))


def _save(path, name, array):
    np.save(path / name, array, allow_pickle=array.dtype == object)


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (lambda p: (p / "tokens.npy").unlink(), FileNotFoundError, "tokens.npy is missing"),
        (lambda p: (p / "manifest.json").unlink(), FileNotFoundError, "manifest.json is missing; .*broken off"),
        (lambda p: (p / "tokens.npy").write_bytes((p / "tokens.npy").read_bytes()[:-10]), ValueError, "tokens.npy cannot be read, it is truncated"),
        (lambda p: (p / "lengths.npy").write_bytes(b""), ValueError, "lengths.npy cannot be read"),
        (lambda p: (p / "loss_mask.npy").write_bytes(b"PK\x03\x04" + b"0" * 99), ValueError, "loss_mask.npy cannot be read"),
        (lambda p: _save(p, "tokens.npy", np.array([[{}]], dtype=object)), ValueError, "tokens.npy cannot be read"),
        (lambda p: _save(p, "tokens.npy", np.zeros((ROWS, WIDTH))), ValueError, "tokens.npy holds float64, expected uint16 or uint32"),
        (lambda p: _save(p, "loss_mask.npy", np.zeros((ROWS, WIDTH - 1), np.uint8)), ValueError, "loss_mask.npy has sha256 .* changed or damaged"),
        (lambda p: _save(p, "tokens.npy", np.zeros((ROWS, WIDTH - 1), np.uint16)), ValueError, r"has shape \(97, 11\) but manifest.json says \(97, 12\)"),
        (lambda p: _flip_last_byte(p / "lengths.npy"), ValueError, "lengths.npy has sha256"),
        (lambda p: _edit_manifest(p, version=2), ValueError, "manifest.json: format version 2 is not 1"),
        (lambda p: _edit_manifest(p, version=True), ValueError, "format version True is not 1"),
        (lambda p: _edit_manifest(p, rows=96), ValueError, r"manifest.json says \(96, 12\)"),
        (lambda p: _edit_manifest(p, skiped={}), ValueError, "manifest.json: unknown key skiped; did you mean skipped"),
        (lambda p: _edit_manifest(p, skipped={"a": "b"}), ValueError, "manifest.json: skipped.a: 'b' is not of type int"),
        (lambda p: (p / "manifest.json").write_text("[]"), ValueError, "format version None is not 1"),
        (lambda p: (p / "manifest.json").write_text("{"), ValueError, "manifest.json is not valid JSON"),
    ],
)
def test_hostile_folders(folder, damage, error, message):
    damage(folder.path)
    with pytest.raises(error, match=message):
        DatasetFolder(folder.path)


def test_missing_folder_and_vocabulary(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        DatasetFolder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"row \d+ holds token id 49, outside 0\.\.48"):
        DatasetFolder(folder.path, 49)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, m, n: (t, m * 0, n), "set: the loss mask is zero on all 97 rows"),
        (lambda t, m, n: (t, m[:, :-1], n), r"shapes disagree or are empty: tokens \(97, 12\), loss_mask \(97, 11\)"),
        (lambda t, m, n: (t[:0], m[:0], n[:0]), "shapes disagree or are empty"),
        (lambda t, m, n: (t, m, n * 0), "row 0 has length 0"),
        (lambda t, m, n: (t, m, n * 0 + 13), r"row 0 has length 13; lengths must lie in 1\.\.12"),
        (lambda t, m, n: (t - 1, m, n), "holds token id -1"),
        (lambda t, m, n: (t, m * 2, n), "loss mask of row 0 is not 0/1"),
        (lambda t, m, n: (t, np.ones_like(m), n), r"loss mask of row \d+ is not 0/1, or is set past the row's length"),
    ],
)
def test_writing_refuses_what_reading_would(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_dataset(tmp_path / "set", *change(*_arrays()), Manifest(name="a", source="b"))
    assert not (tmp_path / "set").exists()


def test_all_zero_mask_is_found_when_reading(folder):
    """The same check on a folder another program wrote, with checksums that fit."""
    _save(folder.path, "loss_mask.npy", np.zeros((ROWS, WIDTH), np.uint8))
    data = json.loads((folder.path / "manifest.json").read_text())
    data["sha256"]["loss_mask.npy"] = hashlib.sha256((folder.path / "loss_mask.npy").read_bytes()).hexdigest()
    _edit_manifest(folder.path, sha256=data["sha256"])
    with pytest.raises(ValueError, match="set: the loss mask is zero on all 97 rows"):
        DatasetFolder(folder.path)


# --- rows that cannot give loss (D02) -----------------------------------------


def test_rows_without_loss_are_told_apart_and_left_out(tmp_path):
    user_only, late, normal = np.zeros(8, np.uint8), np.array([0] * 6 + [1, 1]), np.array([0, 0, 1, 1, 1, 0, 0, 0])
    lone = np.array([0, 1, 0, 1, 0, 0, 0, 0])
    assert [skip_reason(mask, 6) for mask in (user_only, late, normal, lone)] == [
        "no answer tokens",
        "answer starts after max_length",
        None,
        "fewer than two neighbouring answer tokens",
    ]
    assert skip_reason(late) is None and skip_reason(np.ones(1, np.uint8)) is not None
    masks = [user_only, late, normal, lone]
    tokens, mask, lengths = pad_rows([np.arange(8)] * 4, masks, 8)
    write_dataset(tmp_path / "set", tokens, mask, lengths, Manifest(name="a", source="b"))
    folder = DatasetFolder(tmp_path / "set")
    for max_length in (None, 6):
        assert trainable_rows(folder, max_length).tolist() == [i for i in range(4) if skip_reason(masks[i], max_length) is None]
    iterator = make_iterator(folder, data_config=DataConfig(batch_size=2, max_length=6), seed=0)
    assert set(_ids(_take(iterator, 6)).tolist()) == {2}
    with pytest.raises(ValueError, match="no row of 4 has two neighbouring answer tokens in its first 3 positions"):
        make_iterator(folder, data_config=DataConfig(batch_size=2, max_length=3), seed=0)


def test_pad_rows_cuts_and_pads():
    tokens, mask, lengths = pad_rows([np.array([5, 6, 7]), np.array([8])], [np.array([0, 1, 1]), np.array([1])], 2)
    assert tokens.tolist() == [[5, 6], [8, 0]] and mask.tolist() == [[0, 1], [1, 0]] and lengths.tolist() == [2, 1]


# --- the pipeline -------------------------------------------------------------


def test_batches_hold_the_rows_they_name(folder):
    batch = next(make_iterator(folder, data_config=DataConfig(batch_size=8), seed=1))
    assert {name: (value.shape, value.dtype) for name, value in batch.items()} == {
        "tokens": ((8, WIDTH), np.int32),
        "loss_mask": ((8, WIDTH), np.bool_),
        "lengths": ((8,), np.int32),
        "row_ids": ((8,), np.int32),
    }
    tokens, mask, lengths = _arrays()
    np.testing.assert_array_equal(batch["tokens"], tokens[batch["row_ids"]])
    np.testing.assert_array_equal(batch["loss_mask"], mask[batch["row_ids"]] == 1)
    np.testing.assert_array_equal(batch["lengths"], lengths[batch["row_ids"]])


def test_max_length_cuts_rows(folder):
    batch = next(make_iterator(folder, data_config=DataConfig(batch_size=64, max_length=6), seed=1))
    tokens, _, lengths = _arrays()
    np.testing.assert_array_equal(batch["tokens"], tokens[batch["row_ids"], :6])
    np.testing.assert_array_equal(batch["lengths"], np.minimum(lengths[batch["row_ids"]], 6))
    assert batch["lengths"].max() == 6 and batch["lengths"].min() < 6 and batch["loss_mask"].shape == (64, 6)
    wide = next(make_iterator(folder, data_config=DataConfig(batch_size=4, max_length=99), seed=1))
    assert wide["tokens"].shape == (4, WIDTH)


def test_epochs_are_reshuffled_permutations_and_follow_the_seed(folder):
    first, again, other = (_ids(_take(make_iterator(folder, data_config=DataConfig(batch_size=1), seed=seed), 3 * ROWS)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    epochs = first.reshape(3, ROWS)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(ROWS))
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any() and (epochs[0] != np.arange(ROWS)).any()
    assert (other != first).any()


def test_two_processes_partition_each_global_batch(folder):
    """M07: 97 rows, 2 processes, 8 rows each. 6 whole steps a process, and the odd row opens the seventh on both."""
    config = DataConfig(batch_size=16)
    parts = [_take(make_iterator(folder, data_config=config, seed=4, process_index=p, process_count=2), 13) for p in (0, 1)]
    whole = _take(make_iterator(folder, data_config=config, seed=4), 13)
    for step in range(13):
        assert [part[step]["tokens"].shape for part in parts] == [(8, WIDTH)] * 2
        ids = [part[step]["row_ids"].tolist() for part in parts]
        assert sorted(ids[0] + ids[1]) == sorted(whole[step]["row_ids"].tolist())
    six = np.concatenate([_ids(part[:6]) for part in parts])
    assert len(set(six.tolist())) == 96
    seventh = set(_ids([part[6] for part in parts]).tolist())
    assert set(range(ROWS)) - set(six.tolist()) <= seventh


def test_batch_larger_than_the_folder_runs_over_epochs(folder):
    batch = next(make_iterator(folder, data_config=DataConfig(batch_size=2 * ROWS), seed=0))
    assert np.bincount(batch["row_ids"]).tolist() == [2] * ROWS


@pytest.mark.parametrize(
    "config, process, message",
    [
        (DataConfig(batch_size=9), (0, 2), "data.batch_size 9 does not divide into 2 processes"),
        (DataConfig(batch_size=1), (0, 2), "data.batch_size 1 does not divide into 2 processes"),
        (DataConfig(batch_size=8), (2, 2), r"process_index 2 is outside 0\.\.1"),
        (DataConfig(batch_size=8), (-1, 2), "process_index -1"),
        (DataConfig(batch_size=8, max_length=1), (0, 1), "data.max_length 1 leaves no anchor"),
        (DataConfig(batch_size=8, num_workers=-1), (0, 1), "data.num_workers -1 is negative"),
    ],
)
def test_iterator_refuses(folder, config, process, message):
    with pytest.raises(ValueError, match=message):
        make_iterator(folder, data_config=config, seed=0, process_index=process[0], process_count=process[1])


# --- resume (C01) ---------------------------------------------------------------

RESUME = """
import json, sys
from dspine_jax.config import DataConfig
from train.data import DatasetFolder, make_iterator
job = json.loads(sys.argv[1])
def main():
    for state in job["states"]:
        iterator = make_iterator(DatasetFolder(job["folder"]), data_config=DataConfig(**job["data"]), seed=job["seed"])
        iterator.set_state(state)
        print(json.dumps([next(iterator)["row_ids"].tolist() for _ in range(job["batches"])]))
if __name__ == "__main__":
    main()
"""


def _resumed(tmp_path, folder, data, seed, states, batches):
    script = tmp_path / "resume.py"
    job = json.dumps({"folder": str(folder.path), "data": data, "seed": seed, "states": states, "batches": batches})
    root = str(Path(__file__).resolve().parents[1])
    code = f"import sys; sys.path.insert(0, {root!r})\n"
    script.write_text(code + RESUME)
    done = subprocess.run([sys.executable, str(script), job], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]


def _states_and_ids(iterator, saves, total):
    """States after ``saves`` batches, JSON-clean as a checkpoint stores them, and the ids of all batches."""
    states, ids = [], []
    for k in range(total + 1):
        if k in saves:
            states.append(json.loads(json.dumps(iterator.get_state())))
        ids.append(next(iterator)["row_ids"].tolist())
    return states, ids


def test_resume_in_a_new_process_gives_the_same_rest(folder, tmp_path):
    """Batches of 8 of 97 rows: 12 batches end inside the first epoch, the 13th spans into the second."""
    saves, batches = (0, 1, 6, 11, 12, 13), 20
    states, ids = _states_and_ids(make_iterator(folder, data_config=DataConfig(batch_size=8), seed=9), saves, 40)
    resumed = _resumed(tmp_path, folder, {"batch_size": 8}, 9, states, batches)
    assert len(resumed) == len(saves)
    for k, rest in zip(saves, resumed, strict=True):
        assert rest == ids[k : k + batches]


def test_restoring_rewinds_a_used_iterator(folder):
    iterator = make_iterator(folder, data_config=DataConfig(batch_size=8), seed=9)
    _take(iterator, 3)
    state = iterator.get_state()
    rest = _ids(_take(iterator, 5))
    iterator.set_state(state)
    np.testing.assert_array_equal(_ids(_take(iterator, 5)), rest)


@pytest.mark.slow
def test_worker_processes_give_the_same_order_and_resume(folder, tmp_path):
    plain = [batch["row_ids"].tolist() for batch in _take(make_iterator(folder, data_config=DataConfig(batch_size=8), seed=9), 9)]
    states, ids = _states_and_ids(make_iterator(folder, data_config=DataConfig(batch_size=8, num_workers=2), seed=9), (0, 3), 8)
    assert ids == plain
    resumed = _resumed(tmp_path, folder, {"batch_size": 8, "num_workers": 2}, 9, states, 5)
    assert resumed == [plain[0:5], plain[3:8]]


# --- the converter ----------------------------------------------------------------


def _npz_rows():
    """Prompt columns 4, answer columns 3, pad 2 (which is also the end token)."""
    tokens = np.array(
        [
            [2, 2, 10, 11, 20, 21, 2],  # ends inside the cap, end token included
            [12, 13, 14, 15, 22, 23, 24],  # capped, no end token
            [2, 16, 17, 18, 2, 2, 2],  # only the end token
            [2, 2, 2, 19, 2, 2, 2],  # nothing
            [2, 2, 2, 19, 25, 2, 2],
        ],
        np.uint16,
    )
    return {"tokens": tokens, "prompt_pad": np.array([2, 0, 1, 3, 3], np.int16), "answer_len": np.array([3, 3, 1, 0, 2], np.int16)}


class Refused(Exception):
    """The command ended with exit code 2; the text is what it said."""


def _run_convert(arguments: list[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = convert.main(arguments)
    if code:
        assert code == 2 and said.getvalue().startswith("error: ")
        raise Refused(said.getvalue())


def _convert(tmp_path, arrays, *options, output="out"):
    np.savez(tmp_path / "rows.npz", **arrays)
    _run_convert([str(tmp_path / "rows.npz"), "--output", str(tmp_path / output), "--prompt-columns", "4", *options])
    return tmp_path / output


def test_convert_strips_the_pad_and_marks_the_answer(tmp_path, capsys):
    tokenizer = tmp_path / "tok.json"
    tokenizer.write_text("{}")
    options = ("--vocab-size", "26", "--target", "T", "--tokenizer", str(tokenizer), "--template-mode", "non-thinking")
    folder = DatasetFolder(_convert(tmp_path, _npz_rows(), *options), 26)
    assert folder.tokens.tolist() == [[10, 11, 20, 21, 2, 0, 0], [12, 13, 14, 15, 22, 23, 24], [19, 25, 2, 0, 0, 0, 0]]
    assert folder.loss_mask.tolist() == [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]]
    assert folder.lengths.tolist() == [5, 7, 3]
    about = folder.manifest
    assert about.skipped == {"no answer tokens": 1, "fewer than two neighbouring answer tokens": 1}
    assert (about.name, about.target, about.tokenizer, about.template_mode) == ("out", "T", "tok.json", "non-thinking")
    assert about.tokenizer_sha256 == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a" and about.source.startswith("rows.npz, sha256 ")
    printed = capsys.readouterr().out
    assert "3 rows of width 7, 8 answer tokens" in printed and "1 no answer tokens" in printed and "1 fewer than two" in printed


def test_convert_sources_and_limit(tmp_path):
    arrays = _npz_rows() | {"source": np.array([0, 1, 0, 2, 2], np.int8)}
    folder = DatasetFolder(_convert(tmp_path, arrays, "--sources", "0,2"))
    assert folder.lengths.tolist() == [5, 3] and folder.manifest.skipped["source not chosen"] == 1 and folder.manifest.source.endswith("sources 0,2")
    limited = DatasetFolder(_convert(tmp_path, arrays, "--limit", "1", output="small"))
    assert limited.lengths.tolist() == [5] and limited.manifest.skipped == {"beyond the row limit": 4}


def test_convert_benchmark_file_makes_a_folder_each(tmp_path):
    arrays = {f"{name}_{key}": value for name in ("mt-bench", "code_2") for key, value in _npz_rows().items()}
    output = _convert(tmp_path, arrays)
    assert sorted(path.name for path in output.iterdir()) == ["code_2", "mt-bench"]
    for name in ("mt-bench", "code_2"):
        folder = DatasetFolder(output / name)
        assert folder.manifest.name == name and folder.lengths.tolist() == [5, 7, 3]


def test_convert_refuses_to_overwrite(tmp_path):
    output = _convert(tmp_path, _npz_rows())
    with pytest.raises(Refused, match="error: .*out exists and is not empty"):
        _convert(tmp_path, _npz_rows(), "--limit", "1")
    assert DatasetFolder(output).num_rows == 3
    assert DatasetFolder(_convert(tmp_path, _npz_rows(), "--limit", "1", "--overwrite")).num_rows == 1


@pytest.mark.parametrize(
    "change, options, message",
    [
        ({"prompt_pad": np.array([2, 0, 1, 4, 3])}, (), r"prompt_pad\[3\] is 4, outside 0\.\.3"),
        ({"prompt_pad": np.array([-1, 0, 1, 3, 3])}, (), r"prompt_pad\[0\] is -1"),
        ({"answer_len": np.array([3, 3, 4, 0, 2])}, (), r"answer_len\[2\] is 4, outside 0\.\.3"),
        ({"answer_len": np.array([3, 3, 1, 0])}, (), "shapes do not fit"),
        ({"answer_len": np.ones(5)}, (), "answer_len holds float64, expected integers"),
        ({"answer_len": None}, (), "answer_len is missing"),
        ({"tokens": None}, (), "expected tokens, or NAME_tokens"),
        ({"answer_len": np.array([1, 1, 1, 0, 1])}, (), "no row of the file can give loss: .*4 fewer than two"),
        ({}, ("--sources", "0"), "--sources needs an array source"),
        ({}, ("--vocab-size", "25"), r"tokens row 4 holds id 25, outside 0\.\.24"),
        ({}, ("--prompt-columns", "7"), "has 7 columns, --prompt-columns 7 leaves none for answers"),
    ],
)
def test_convert_errors_write_nothing(change, options, message, tmp_path):
    arrays = {key: value for key, value in (_npz_rows() | change).items() if value is not None}
    with pytest.raises(Refused, match=message):
        _convert(tmp_path, arrays, *options)
    assert not (tmp_path / "out").exists()


def test_convert_refuses_bad_files_and_names(tmp_path):
    arrays = {f"../up_{key}": value for key, value in _npz_rows().items()}
    with pytest.raises(Refused, match="benchmark name '../up' is not a plain folder name"):
        _convert(tmp_path, arrays)
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(Refused, match="bad.npz is not a readable .npz"):
        _run_convert([str(tmp_path / "bad.npz"), "--output", str(tmp_path / "out")])
    np.savez(tmp_path / "object.npz", tokens=np.array([{}], dtype=object))
    with pytest.raises(Refused, match="object.npz is not a readable .npz of plain arrays"):
        _run_convert([str(tmp_path / "object.npz"), "--output", str(tmp_path / "out")])
    with pytest.raises(Refused, match="absent.npz does not exist"):
        _run_convert([str(tmp_path / "absent.npz"), "--output", str(tmp_path / "out")])


def test_convert_help_and_argument_checks(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        convert.main(["--help"])
    assert stop.value.code == 0 and "dspine-convert train.npz --output" in capsys.readouterr().out
    for options in (["--limit", "0"], ["--sources", "a"], ["--vocab-size", "-5"]):
        with pytest.raises(SystemExit) as stop:
            convert.main(["x.npz", "--output", str(tmp_path), *options])
        assert stop.value.code == 2


def test_convert_measuring_data(shared_dir, tmp_path):
    """The stored continuations: an answer that ends before its cap ends with the end token, which is supervised."""
    convert.main([str(shared_dir / "data" / "smollm2" / "dev.npz"), "--output", str(tmp_path / "dev"), "--vocab-size", "49152"])
    names = sorted(path.name for path in (tmp_path / "dev").iterdir())
    assert names == ["arena-hard-v2", "gsm8k", "humaneval", "livecodebench", "math500", "mbpp", "mt-bench"]
    with np.load(shared_dir / "data" / "smollm2" / "dev.npz") as data:
        for name in names:
            folder = DatasetFolder(tmp_path / "dev" / name, 49152)
            assert (folder.num_rows, folder.width) == (32, 768)
            for i in range(32):
                pad, answer = int(data[f"{name}_prompt_pad"][i]), int(data[f"{name}_answer_len"][i])
                length, mask = int(folder.lengths[i]), folder.loss_mask[i] == 1
                assert length == 512 - pad + answer and mask.sum() == answer
                np.testing.assert_array_equal(folder.tokens[i][mask], data[f"{name}_tokens"][i, 512 : 512 + answer])
                assert folder.tokens[i, 0] == 1  # <|im_start|>
                assert answer == 256 or folder.tokens[i, length - 1] == 2
