"""``equipoise doctor``: what it prints, and its exit status."""

from __future__ import annotations

import pytest

from equipoise.errors import EquipoiseError
from equipoise.trainer_hooks.on_verl import doctor

CHECKS = ("versions", "imports", "entry_point", "hydra_group", "patch_points", "attached")


@pytest.fixture
def _all_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHECKS:
        monkeypatch.setattr(doctor, f"check_{name}", lambda name=name: f"{name} is fine")


@pytest.mark.usefixtures("_all_well")
def test_each_check_has_its_line_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.examine() == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    for line, name in zip(lines, CHECKS, strict=True):
        assert line.startswith("ok ")
        assert line.endswith(f"{name} is fine")
    assert doctor.examine(quiet=True) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("_all_well")
@pytest.mark.parametrize("error", [EquipoiseError("not as tested"), ImportError("not as tested")])
def test_what_is_wrong_is_printed_even_when_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fails() -> str:
        raise error

    monkeypatch.setattr(doctor, "check_patch_points", fails)
    assert doctor.examine(quiet=True) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("BAD")
    assert line.endswith("not as tested")
    assert summary.startswith("1 of 6 ")


def test_a_package_that_verl_needs_and_does_not_declare_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_UNDECLARED", {"a_module_that_nobody_has": "some-package", "json": "json"})
    with pytest.raises(EquipoiseError, match=r"\bsome-package; "):
        doctor.check_imports()


@pytest.mark.slow
def test_this_environment_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.examine() == 0, capsys.readouterr().out
