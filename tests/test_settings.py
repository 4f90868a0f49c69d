"""Settings: groups, help, flags against the environment, and how values are written."""

from __future__ import annotations

from pathlib import Path

import pytest
from live import serve
from pydantic import ValidationError
from pydantic_settings import SettingsError

from tokenteller.server.__main__ import main
from tokenteller.server.cli import COMMANDS
from tokenteller.server.cli.parse import parse
from tokenteller.server.setting_types import parse_bytes
from tokenteller.server.settings import GROUPS, ServeSettings


def test_every_setting_of_serve_is_in_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(ServeSettings.model_fields)


def test_the_help_of_serve_has_the_groups_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    help_ = capsys.readouterr().out
    assert ended.value.code == 0
    titles = [line[:-1] for line in help_.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["options", *GROUPS]
    for name in ServeSettings.model_fields:
        assert f"  --{name.replace('_', '-')}" in help_
    assert "(default: 8000)" in help_ and "TOKENTELLER_KV_MEMORY" in help_


def test_help_without_a_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    help_ = capsys.readouterr().out
    assert all(f"  {name} " in help_ and does in help_ for name, does in COMMANDS.items())


def test_a_flag_overrides_its_variable_and_a_repeated_flag_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENTELLER_PORT", "1234")
    monkeypatch.setenv("TOKENTELLER_SLOTS", "7")
    monkeypatch.setenv("TOKENTELLER_KV_MEMORY", "")
    origins = ["--cors-origin", "http://a:1", "--cors-origin=http://b,http://c"]
    settings = parse("serve", ServeSettings, ["--port", "99", *origins, "--no-explain", "--prefault"])
    assert (settings.port, settings.slots, settings.kv_memory) == (99, 7, None)
    assert settings.cors_origin == ("http://a:1", "http://b", "http://c")
    assert settings.prefault and not settings.explain


def test_a_flag_is_written_in_full() -> None:
    with pytest.raises(SettingsError, match="--por"):
        parse("serve", ServeSettings, ["--por", "1"])


def test_keys_come_from_flags_and_files_and_no_error_shows_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key\n\n second-key \n")
    settings = parse("serve", ServeSettings, ["--api-key", f"@{file}", "--api-key", "third-key"])
    assert [key.get_secret_value() for key in settings.api_key] == ["first-key", "second-key", "third-key"]
    assert "third-key" not in repr(settings)
    with pytest.raises(ValidationError, match="cannot read keys from"):
        parse("serve", ServeSettings, ["--api-key", f"@{tmp_path}/none"])


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("2GiB", 2**31), ("512 MB", 512 * 10**6), ("1.5k", 1500), ("3Mi", 3 * 2**20)]
)
def test_sizes_are_bytes_or_have_a_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_the_served_name_is_the_models_name_everywhere(rand: Path) -> None:
    with serve(model=str(rand), served_model_name="mine", slots=1) as live:
        assert live.post("/v1/completions", model="mine", prompt="x", max_tokens=1).json()["model"] == "mine"
        assert live.post("/v1/completions", model=rand.name, prompt="x", max_tokens=1).status_code == 404
        metrics = live.service.metrics.text().decode()
        assert 'model_name="mine"' in metrics and f'model_name="{rand.name}"' not in metrics


@pytest.mark.parametrize("prefault", [False, True])
def test_the_pool_is_touched_only_on_request(prefault: bool, rand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr("tokenteller.model.kv_pool.KVPool.prefault", lambda pool, budget: touched.append(budget))
    with serve(model=str(rand), slots=4, kv_memory=2**18, prefault=prefault):
        assert touched == ([2**18] if prefault else [])
