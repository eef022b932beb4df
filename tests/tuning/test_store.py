"""The store on disk: what is found, what is kept, and what survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from attn_graph.backends.tunable import KERNELS
from attn_graph.profilers.sample import Case
from attn_graph.tuning import store
from attn_graph.tuning.store import (
    DEFAULT,
    EXACT,
    FAMILY,
    NEIGHBOUR,
    SHIPPED,
    Entry,
    Key,
    StoreError,
    describe,
    lookup,
    lookup_case,
)

KEY = Key("NVIDIA H200", "decode_metadata", 64, True, bucket=64, columns=2048, context="loguniform:1:131072")
CONFIG = {"programs_per_row": 8, "block": 256, "num_warps": 4}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "tuned"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "tuned"


def file_content(folder: Path) -> dict:
    return json.loads((folder / store.FILE).read_text())


def write(folder: Path, content: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / store.FILE
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def raw(key: Key, config: dict = CONFIG, **more) -> dict:
    return {"key": asdict(key), "config": config, **more}


# What is found.


def test_what_was_saved_is_found_under_its_whole_key(folder):
    store.save([Entry(KEY, CONFIG, {"p50_us": 1.4})])
    found = lookup(KEY)
    assert (found.config, found.rule, found.file) == (CONFIG, EXACT, folder / store.FILE)
    assert describe(found) == (
        f"Block sizes: tuned (exact) programs_per_row=8 block=256 num_warps=4, from {folder / store.FILE} under {KEY}"
    )


def test_another_gpu_gets_the_default_and_the_key_that_was_searched(folder):
    store.save([Entry(KEY, CONFIG)])
    found = lookup(replace(KEY, device="NVIDIA B200"))
    assert (found.config, found.rule) == (None, DEFAULT)
    line = describe(found)
    assert line.startswith(
        "Block sizes: default, searched NVIDIA B200, decode_metadata of trtllm_mha, decode, bucket 64"
    )
    assert str(folder / store.FILE) in line
    assert line.endswith("tuned only for NVIDIA H200")
    assert "\n" not in line


def test_an_empty_store_says_how_to_fill_it():
    found = lookup(KEY)
    assert (found.config, found.rule) == (None, DEFAULT)
    assert "run 'attn-graph tune'" in describe(found)


@pytest.mark.parametrize("bucket", [1, 2, 4, 8])
def test_a_large_batch_never_gets_what_was_tuned_for_small_ones(bucket):
    store.save([Entry(replace(KEY, bucket=bucket), CONFIG)])
    found = lookup(replace(KEY, bucket=512))
    assert (found.config, found.rule) == (None, DEFAULT)
    assert f"{bucket} x 2048" in found.detail
    assert "within 2 times" in found.detail


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, EXACT),
        ({"bucket": 32}, NEIGHBOUR),
        ({"bucket": 128}, NEIGHBOUR),
        ({"bucket": 31}, DEFAULT),
        ({"bucket": 129}, DEFAULT),
        ({"columns": 1024}, NEIGHBOUR),
        ({"columns": 4096}, NEIGHBOUR),
        ({"columns": 1023}, DEFAULT),
        ({"columns": 4097}, DEFAULT),
        ({"bucket": 128, "columns": 1024}, NEIGHBOUR),
        ({"context": "8192"}, NEIGHBOUR),
        ({"context": "1+8192+16384"}, NEIGHBOUR),
        ({"context": "512"}, DEFAULT),
        ({"context": "uniform:1:131072"}, DEFAULT),
        ({"context": "no mix"}, DEFAULT),
        ({"mode": "target_verify"}, NEIGHBOUR),
        ({"backend": "flashattention"}, NEIGHBOUR),
        ({"page_size": 32}, DEFAULT),
        ({"swa": False}, DEFAULT),
        ({"tail": "zero_tail"}, DEFAULT),
        ({"seq_lens": "int32"}, DEFAULT),
        ({"req_pool_indices": "int32"}, DEFAULT),
        ({"kernel": "kv_indices"}, DEFAULT),
    ],
)
def test_a_neighbour_is_near_and_of_the_same_variant(changes, rule):
    store.save([Entry(KEY, CONFIG)])
    found = lookup(replace(KEY, **changes))
    assert found.rule == rule
    assert (found.config is None) == (rule == DEFAULT)
    if rule == NEIGHBOUR:
        for name in changes:
            assert f"{name} {getattr(KEY, name)}" in describe(found)


def test_the_nearest_neighbour_wins_and_the_measured_mix_breaks_a_draw():
    near, far = {"block": 1}, {"block": 2}
    store.save([Entry(replace(KEY, bucket=32), far), Entry(replace(KEY, bucket=96), near)])
    assert lookup(replace(KEY, bucket=64)).config == near
    store.save([Entry(replace(KEY, bucket=96, context="8192"), {"block": 3})])
    assert lookup(replace(KEY, bucket=80)).config == near
    assert lookup(replace(KEY, bucket=80, context="8192")).config == {"block": 3}


@pytest.mark.parametrize(
    ("context", "mean"),
    [
        ("8192", 8192),
        ("1+3", 2),
        ("uniform:1:2048", 1024.5),
        ("loguniform:7:7", 7),
        ("loguniform:1:131072", 11122.7),
        ("", None),
        ("a run", None),
        ("uniform:1", None),
    ],
)
def test_the_mean_of_a_mix(context, mean):
    assert store.mean_length(context) == (None if mean is None else pytest.approx(mean, rel=1e-4))


@pytest.mark.parametrize(
    ("serves", "short", "long"),
    [
        ([], DEFAULT, DEFAULT),
        (["short"], NEIGHBOUR, DEFAULT),
        (["long"], DEFAULT, NEIGHBOUR),
        (["short", "long"], NEIGHBOUR, NEIGHBOUR),
        ("short", DEFAULT, DEFAULT),  # by hand, and wrong
    ],
)
def test_lengths_unlike_the_mix_get_a_choice_only_if_it_was_timed_on_such(serves, short, long):
    store.save([Entry(KEY, CONFIG, {store.SERVES: serves})])
    assert lookup(replace(KEY, context="uniform:1:2048")).rule == short
    assert lookup(replace(KEY, context="uniform:1:131072", bucket=96)).rule == long
    assert lookup(replace(KEY, context="uniform:1:16384")).rule == NEIGHBOUR, "as long as the mix, in the mean"
    if short == DEFAULT:
        told = describe(lookup(replace(KEY, context="uniform:1:2048")))
        assert "tuned for loguniform:1:131072 only" in told
        assert "slower than the default or not timed" in told


def test_a_shipped_table_is_used_where_the_user_has_nothing_and_never_written(tmp_path):
    (tmp_path / "shipped").mkdir()
    table = tmp_path / "shipped" / "h200.json"
    table.write_text(json.dumps({"schema": store.SCHEMA, "entries": [raw(KEY, {"block": 1})]}))
    before = table.read_bytes()
    assert (lookup(KEY).config, lookup(KEY).file) == ({"block": 1}, table)
    store.save([Entry(replace(KEY, bucket=32), {"block": 2})])
    assert lookup(KEY).config == {"block": 1}, "exact in a shipped table beats the user's neighbour"
    store.save([Entry(KEY, {"block": 3})])
    assert lookup(KEY).config == {"block": 3}, "the user's own is first"
    assert table.read_bytes() == before


def test_a_case_is_looked_up_by_its_own_shape_and_a_backend_without_block_sizes_is_no_error():
    store.save([Entry(KEY, CONFIG)])
    case = Case("trtllm_mha", "decode", 60, 64, "loguniform:1:131072", 64, 131072, swa=True)
    assert lookup_case(case, "NVIDIA H200").config == CONFIG
    other = lookup_case(replace(case, backend="something"), "NVIDIA H200")
    assert (other.config, other.rule) == (None, DEFAULT)
    assert "something" in describe(other)


@pytest.mark.parametrize(
    ("device", "rule"),
    [
        ("NVIDIA H200", EXACT),
        ("NVIDIA H100 80GB HBM3", FAMILY),
        ("NVIDIA GH200 480GB", FAMILY),
        ("NVIDIA H20", DEFAULT),  # fewer multiprocessors
        ("NVIDIA B200", DEFAULT),
        ("AMD Instinct MI300X", DEFAULT),
        ("Some GPU", DEFAULT),
    ],
)
def test_a_gpu_of_the_same_generation_gets_what_was_measured_on_its_relative_and_is_told(device, rule):
    store.save([Entry(KEY, CONFIG)])
    found = lookup(replace(KEY, device=device))
    assert found.rule == rule
    if rule == FAMILY:
        assert found.config == CONFIG
        assert "measured for device NVIDIA H200; what it costs on this GPU is not known" in describe(found)


def test_the_order_is_exact_then_a_neighbour_on_this_gpu_then_the_family_then_the_default():
    h100 = replace(KEY, device="NVIDIA H100 80GB HBM3")
    relative, near, own = {"block": 1}, {"block": 2}, {"block": 3}
    for entry, config, rule in (
        (Entry(KEY, relative), relative, FAMILY),
        (Entry(replace(h100, bucket=32), near), near, NEIGHBOUR),
        (Entry(h100, own), own, EXACT),
    ):
        assert lookup(replace(h100, bucket=1024)).rule == DEFAULT
        store.save([entry])
        assert (lookup(h100).config, lookup(h100).rule) == (config, rule)


def test_where_the_default_was_best_a_neighbour_gets_its_own_default_and_not_the_other_shapes():
    store.save([Entry(KEY, CONFIG, {store.CHOSE_DEFAULT: True})])
    assert lookup(KEY).config == CONFIG
    found = lookup(replace(KEY, bucket=96))
    assert (found.config, found.rule) == (None, NEIGHBOUR)
    assert "default (neighbour, measured for bucket 64: there the default is best)" in describe(found)


def test_what_a_rule_lost_on_tuned_shapes_is_part_of_the_answer():
    for bucket, rule, regret in (
        (8, NEIGHBOUR, 0.01),
        (64, NEIGHBOUR, 0.04),
        (256, DEFAULT, 0.2),
        (512, NEIGHBOUR, None),
    ):
        store.save([Entry(replace(KEY, bucket=bucket), CONFIG, {"left_out": {"rule": rule, "regret": regret}})])
    assert "left out, 2 tuned shapes lose at most 4.0% by this rule, 2.5% in median" in describe(
        lookup(replace(KEY, bucket=96))
    )
    assert "left out, 1 tuned shapes lose at most 20.0%" in describe(lookup(replace(KEY, bucket=1)))
    assert "left out" not in describe(lookup(KEY))
    assert "left out" not in describe(lookup(replace(KEY, bucket=96, kernel="csr_metadata")))


def test_a_shape_that_is_left_out_is_judged_without_its_other_mixes():
    entries = [
        Entry(replace(KEY, bucket=64), {"block": 1}),
        Entry(replace(KEY, bucket=64, context="8192"), {"block": 2}),
        Entry(replace(KEY, bucket=96), {"block": 3}),
    ]
    assert store.left_out(entries[0], entries) == (NEIGHBOUR, {"block": 3})
    assert store.left_out(entries[0], entries[:2]) == (DEFAULT, None)


def test_two_files_are_told_apart_by_their_choices(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    moved = replace(KEY, bucket=8)
    contents = ([raw(KEY), raw(moved, {"block": 1})], [raw(KEY, p50_us=3.0), raw(moved, {"block": 2})])
    for path, entries in zip(files, contents, strict=True):
        path.write_text(json.dumps({"schema": store.SCHEMA, "entries": entries}))
    ((key, a, b),) = store.diff(*files)
    assert (key, a.config, b.config) == (moved, {"block": 1}, {"block": 2})
    files[1].write_text(json.dumps({"schema": store.SCHEMA, "entries": []}))
    assert [(x is None, y is None) for _, x, y in store.diff(*files)] == [(False, True)] * 2
    with pytest.raises(StoreError, match=r"c\.json is not there"):
        store.diff(files[0], tmp_path / "c.json")


@pytest.mark.parametrize("table", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_is_whole_and_every_choice_is_one_that_its_kernel_takes(table):
    file = store._read(table)
    entries = list(file.entries())
    assert (file.problem, len(entries)) == ("", len(file.content["entries"]))
    kernels = {kernel.name: kernel for kernel in KERNELS.values()}
    for entry in entries:
        assert kernels[entry.key.kernel].config_of(entry.config).as_dict() == entry.config


RESULTS = Path(__file__).parents[2] / "results" / "h200"


def test_the_table_of_the_h200_is_what_its_logs_say():
    """Every choice is a finalist of a log, with its time, beside the default's."""
    entries = list(store._read(SHIPPED / "h200.json").entries())
    assert len(entries) == 28
    assert {entry.key.kernel for entry in entries} == {kernel.name for kernel in KERNELS.values()}
    logs = [pd.read_csv(RESULTS / name, dtype=str) for name in ("tune.csv.gz", "tune_exhaustive.csv.gz")]
    for entry in entries:
        log = logs[entry.key.bucket == 64]
        shape = {"backend": entry.key.backend, "bucket": str(entry.key.bucket), "swa": str(entry.key.swa)}
        own = log[(log[list(shape)] == pd.Series(shape)).all(axis=1) & (log["phase"] == "final_hot")]
        times = own.set_index("candidate")["p50_us"].astype(float)
        setting = " ".join(f"{name}={value}" for name, value in entry.config.items())
        assert times[setting] == pytest.approx(entry.facts["p50_us"], abs=1e-4)
        assert entry.facts["p50_us"] <= entry.facts["default_p50_us"]
        assert entry.key.device == "NVIDIA H200"


def test_on_the_held_out_shapes_of_the_h200_the_table_gives_nothing_that_was_slower_there():
    entries = list(store._read(SHIPPED / "h200.json").entries())
    held = pd.read_csv(RESULTS / "tune_held_out.csv")
    given = []
    for shape in held.itertuples():
        like = next(
            e.key for e in entries if (e.key.backend, e.key.swa, e.key.bucket) == (shape.backend, shape.swa, 64)
        )
        found = store.nearest(replace(like, bucket=shape.bucket, context=shape.context), entries)
        given.append(found[0] if found else DEFAULT)
    assert given == held["rule"].tolist()
    tuned = held[held["rule"] != DEFAULT]
    assert (len(held), len(tuned)) == (21, 16)
    assert not set(tuned["verdict"]) & {"slower", "not measured"}
    assert np.exp(np.log(tuned["ratio"]).mean()) < 0.9


# What is kept.


def test_saving_again_replaces_only_the_same_key():
    store.save([Entry(KEY, CONFIG), Entry(replace(KEY, bucket=8), {"block": 1})])
    store.save([Entry(KEY, {"block": 2})])
    assert lookup(KEY).config == {"block": 2}
    assert lookup(replace(KEY, bucket=8)).config == {"block": 1}
    assert len(store.saved_entries()[0]) == 2


def test_unknown_fields_and_entries_of_newer_versions_are_kept_and_not_used(folder):
    newer = {"key": {**asdict(KEY), "tp": 8}, "config": {"block": 7}, "why": "tuned over ranks"}
    odd = [newer, "not an entry", {"key": 3}, raw(replace(KEY, bucket=0)), raw(replace(KEY, bucket=2), {"block": "x"})]
    write(folder, {"schema": store.SCHEMA, "owner": "me", "entries": [*odd, raw(KEY, note="by hand")]})
    store.save([Entry(KEY, {"block": 2}, {"p50_us": 1.0})])
    content = file_content(folder)
    assert content["owner"] == "me"
    assert content["entries"][:5] == odd
    assert content["entries"][5] == {**raw(KEY, {"block": 2}), "note": "by hand", "p50_us": 1.0}
    assert lookup(KEY).config == {"block": 2}
    assert [entry.key for _, entry in store.saved_entries()[0]] == [KEY]


def test_entries_of_another_gpu_are_kept(folder):
    store.save([Entry(replace(KEY, device="AMD Instinct MI300X"), {"block": 1})])
    store.save([Entry(KEY, CONFIG)])
    assert {e["key"]["device"] for e in file_content(folder)["entries"]} == {"AMD Instinct MI300X", "NVIDIA H200"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"entries": [raw(KEY)]}, "no schema version"),
        ({"schema": 99, "entries": [raw(KEY)]}, "schema version 99"),
        ('{"schema": 1, "entries": [{"key"', "not valid JSON"),
        ([1, 2], "no table of tuned block sizes"),
        ({"schema": store.SCHEMA, "entries": 3}, "no table of tuned block sizes"),
    ],
)
def test_an_unusable_file_is_ignored_with_a_note_and_healed_by_the_next_save(folder, content, problem):
    path = write(folder, content)
    before = path.read_bytes()
    found = lookup(KEY)
    assert (found.config, found.rule) == (None, DEFAULT)
    assert problem in describe(found)
    assert problem in store.saved_entries()[1][0]
    assert path.read_bytes() == before, "looking does not change it"
    (note,) = store.save([Entry(KEY, CONFIG)])
    assert problem in note
    assert lookup(KEY).config == CONFIG
    assert (folder / "tuned.aside-1.json").read_bytes() == before
    assert store.save([Entry(KEY, CONFIG)]) == []


def test_clearing_renames_and_every_older_file_stays(folder):
    assert "nothing is stored" in store.clear()
    for _ in range(2):
        store.save([Entry(KEY, CONFIG)])
        assert "it is now" in store.clear()
        assert lookup(KEY).rule == DEFAULT
    assert [p.name for p in sorted(folder.glob("tuned.aside-*"))] == ["tuned.aside-1.json", "tuned.aside-2.json"]


# What survives.

WRITER = """
import sys, time
from pathlib import Path
from attn_graph.tuning import store
from attn_graph.tuning.store import Entry, Key
number, gate, locked = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "locked"
replace = store._replace
store._replace = lambda *a: (time.sleep(0.05), replace(*a))  # so that the others read meanwhile
if not locked:
    from contextlib import nullcontext
    store._locked = lambda path: (path.parent.mkdir(exist_ok=True, parents=True), nullcontext())[1]
while not gate.exists():
    time.sleep(0.005)
for bucket in range(1, 4):
    try:
        store.save([Entry(Key("GPU", "kernel", 64, False, bucket=100 * number + bucket, columns=1), {"block": number})])
    except OSError:
        pass
"""


def keys_after_writers_at_once(gate: Path, n: int, mode: str) -> int:
    """How many of their 3 * n keys can be found afterwards; none where they broke the file."""
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen([*command, str(i), str(gate), mode], stderr=subprocess.DEVNULL) for i in range(n)]
    time.sleep(0.5)
    gate.touch()
    assert [writer.wait(60) for writer in writers] == [0] * n
    return len(store.saved_entries()[0])


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    assert keys_after_writers_at_once(tmp_path / "gate", 8, "locked") == 8 * 3


def test_without_the_lock_the_same_writers_lose_entries(tmp_path):
    assert keys_after_writers_at_once(tmp_path / "gate", 4, "unlocked") < 4 * 3


KILLED = """
import json, sys, time
from attn_graph.tuning import store
from attn_graph.tuning.store import Entry, Key
def half(content, file, **options):
    text = json.dumps(content)
    file.write(text[: len(text) // 2])
    file.flush()
    print("half written", flush=True)
    time.sleep(60)
store.json.dump = half
store.save([Entry(Key("GPU", "kernel", 64, False), {"block": 1})])
"""


def test_a_writer_killed_in_mid_write_leaves_the_old_file_and_no_lock(folder):
    store.save([Entry(KEY, CONFIG)])
    before = (folder / store.FILE).read_bytes()
    writer = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "half written\n"
    assert lookup(KEY).config == CONFIG, "readers do not wait"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    assert (folder / store.FILE).read_bytes() == before
    store.save([Entry(replace(KEY, bucket=8), {"block": 1})])
    assert {entry.key.bucket for _, entry in store.saved_entries()[0]} == {8, 64}
    assert sorted(p.name for p in folder.iterdir()) == ["tuned.json", "tuned.json.lock"]


def test_a_lock_that_is_never_released_is_named(monkeypatch, folder):
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.2)
    folder.mkdir()
    code = (
        "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); "
        "print('held', flush=True); time.sleep(60)"
    )
    lock = str(folder / "tuned.json.lock")
    holder = subprocess.Popen([sys.executable, "-c", code, lock], stdout=subprocess.PIPE, text=True)
    try:
        holder.stdout.readline()
        with pytest.raises(StoreError, match=r"tuned\.json\.lock has been held by another process for 0\.2 s"):
            store.save([Entry(KEY, CONFIG)])
    finally:
        holder.kill()
        holder.wait()
    store.save([Entry(KEY, CONFIG)])


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "file" / "tuned"))
    for attempt in (store.check_writable, lambda: store.save([Entry(KEY, CONFIG)])):
        with pytest.raises(StoreError, match=r"cannot write tuned block sizes to .*file/tuned.*ATTN_GRAPH_TUNED_DIR"):
            attempt()
    assert lookup(KEY).rule == DEFAULT


def test_without_a_home_directory_saving_is_refused_and_looking_is_not(monkeypatch, tmp_path):
    monkeypatch.delenv(store.FOLDER_VARIABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_config_path", lambda *a, **k: Path("~/.config/attn-graph"))
    assert lookup(KEY).rule == DEFAULT
    with pytest.raises(StoreError, match="there is no home directory"):
        store.check_writable()
    assert list(tmp_path.iterdir()) == []


def test_the_users_configuration_folder_is_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv(store.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert store.check_writable() == tmp_path / "config" / "attn-graph" / store.FILE
