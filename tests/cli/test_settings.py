"""Flags, environment and TOML mean the same, and what is wrong in them is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_grpc.cli import settings
from pd_grpc.cli.settings import SettingsError, load_settings, settings_help, settings_table
from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig, ServerConfig

ROLES = tuple(settings.ROLES.values())
WriteToml = Callable[[str], Path]


@pytest.fixture
def write_toml(tmp_path: Path) -> WriteToml:
    def write(text: str) -> Path:
        path = tmp_path / "pd.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def error_of(
    argv: list[str],
    environ: dict[str, str] | None = None,
    toml: Path | None = None,
    cls: type[ServerConfig] = DecodeConfig,
) -> str:
    with pytest.raises(SettingsError) as raised:
        load_settings(cls, argv, environ or {}, toml)
    return str(raised.value)


# --- one meaning in three places -----------------------------------------------------------------


def test_nothing_given_is_every_default() -> None:
    assert load_settings(DecodeConfig, [], {}) == DecodeConfig()


def test_a_flag_a_variable_and_a_key_mean_the_same(write_toml: WriteToml) -> None:
    by_flag = load_settings(DecodeConfig, ["--lease-s", "5"], {})
    by_flag_with_equals = load_settings(DecodeConfig, ["--lease-s=5"], {})
    by_variable = load_settings(DecodeConfig, [], {"PD_LEASE_S": "5"})
    by_key = load_settings(DecodeConfig, [], {}, write_toml("lease_s = 5"))
    assert by_flag == by_flag_with_equals == by_variable == by_key == DecodeConfig(lease_s=5)


@given(st.integers(min_value=0, max_value=65535))
def test_any_port_reads_back_from_flag_and_variable(port: int) -> None:
    assert load_settings(RouterConfig, ["--port", str(port)], {}).port == port
    assert load_settings(RouterConfig, [], {"PD_PORT": str(port)}).port == port


def test_several_endpoints_in_each_place(write_toml: WriteToml) -> None:
    expected = RouterConfig(prefill=("a:1", "b:2", "c:3"))
    flags = ["--prefill", "a:1", "--prefill", "b:2,c:3"]
    assert load_settings(RouterConfig, flags, {}) == expected
    assert load_settings(RouterConfig, [], {"PD_PREFILL": "a:1, b:2,c:3"}) == expected
    toml = write_toml('prefill = ["a:1", "b:2", "c:3"]')
    assert load_settings(RouterConfig, [], {}, toml) == expected


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--aggregated"], {}, True),
        (["--aggregated=true"], {}, True),
        (["--aggregated=false"], {}, False),
        ([], {"PD_AGGREGATED": "1"}, True),
        (["--no-aggregated"], {"PD_AGGREGATED": "1"}, False),
    ],
)
def test_a_switch_is_on_by_its_name_and_off_by_no(
    argv: list[str], environ: dict[str, str], expected: bool
) -> None:
    assert load_settings(RouterConfig, argv, environ).aggregated is expected


# --- which place wins ----------------------------------------------------------------------------


def test_flags_go_before_environment_before_file_before_default(write_toml: WriteToml) -> None:
    toml = write_toml("lease_s = 3\nheartbeat_s = 3\ngrace_s = 3")
    environ = {"PD_LEASE_S": "2", "PD_HEARTBEAT_S": "2"}
    config = load_settings(DecodeConfig, ["--lease-s", "1"], environ, toml)
    assert (config.lease_s, config.heartbeat_s, config.grace_s) == (1, 2, 3)
    assert config.attach_s == DecodeConfig().attach_s


def test_endpoints_on_flags_replace_those_of_the_environment() -> None:
    config = load_settings(RouterConfig, ["--prefill", "a:1"], {"PD_PREFILL": "b:2"})
    assert config.prefill == ("a:1",)


def test_the_file_is_named_by_flag_then_variable_then_the_caller(tmp_path: Path) -> None:
    paths = {}
    for name, lease in (("flag", 1), ("variable", 2), ("caller", 3)):
        paths[name] = tmp_path / f"{name}.toml"
        paths[name].write_text(f"lease_s = {lease}", encoding="utf-8")
    flag = ["--config", str(paths["flag"])]
    variable = {"PD_CONFIG": str(paths["variable"])}
    assert load_settings(DecodeConfig, flag, variable, paths["caller"]).lease_s == 1
    assert load_settings(DecodeConfig, [], variable, paths["caller"]).lease_s == 2
    assert load_settings(DecodeConfig, [], {}, paths["caller"]).lease_s == 3


# --- what is wrong is named ----------------------------------------------------------------------


def test_a_value_out_of_bounds_names_field_limit_and_flag() -> None:
    assert error_of(["--lease-s", "-1"]) == (
        "lease_s must be greater than 0, not '-1' (from --lease-s)"
    )


def test_a_value_out_of_bounds_names_the_variable() -> None:
    message = error_of([], {"PD_PORT": "70000"})
    assert message == "port must be less than or equal to 65535, not '70000' (from PD_PORT)"


def test_a_value_out_of_bounds_names_the_key_and_the_file(write_toml: WriteToml) -> None:
    path = write_toml('engine = "tensor"')
    message = error_of([], toml=path)
    assert message == f"engine must be 'torch' or 'sim', not 'tensor' (from engine in {path})"


@pytest.mark.parametrize("value", ["nan", "inf", "soon", ""])
def test_a_duration_that_is_no_finite_number_is_refused(value: str) -> None:
    assert "lease_s" in error_of([f"--lease-s={value}"])


@pytest.mark.parametrize(
    ("transports", "wrong"),
    [("rdma", "there is no transport rdma"), ("shm,my.rdma", "there is no module my.rdma")],
)
def test_a_transport_that_is_not_there_names_those_that_are(transports: str, wrong: str) -> None:
    assert error_of(["--transports", transports]) == (
        "transports must be among shm, nixl, inline and Python modules with a dot in their names: "
        f"{wrong} (from --transports)"
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--bulk-port", "65534", "--tp", "3"],
            "bulk_port counts on to 65536, and 65535 is the last (from --bulk-port)",
        ),
        (
            ["--bulk-port", "7000", "--tp", "2", "--pp", "2", "--port", "7003"],
            "bulk_port takes 7000 to 7003, and 7003 is the control port (port) (from --bulk-port)",
        ),
        (
            ["--bulk-port", "7000", "--port", "7000"],
            "bulk_port takes 7000, and 7000 is the control port (port) (from --bulk-port)",
        ),
    ],
)
def test_ports_of_shards_that_are_none_or_taken_are_refused(argv: list[str], says: str) -> None:
    assert error_of(argv) == says


def test_ports_of_shards_may_reach_to_the_last_and_to_beside_the_control_port() -> None:
    last = load_settings(DecodeConfig, ["--bulk-port", "65534", "--tp", "2"], {})
    beside = load_settings(DecodeConfig, ["--bulk-port", "7000", "--tp", "2", "--port", "7002"], {})
    assert (last.bulk_port, beside.bulk_port) == (65534, 7000)


def test_one_alone_of_a_list_needs_no_brackets_in_the_file(write_toml: WriteToml) -> None:
    toml = write_toml('transports = "inline"\nprefill = "a:1"\ndecode = "b:2"')
    assert load_settings(DecodeConfig, [], {}, toml).transports == ("inline",)
    router = load_settings(RouterConfig, [], {}, toml)
    assert (router.prefill, router.decode) == (("a:1",), ("b:2",))


def test_every_wrong_field_is_named_at_once() -> None:
    message = error_of(["--lease-s", "0"], {"PD_BLOCK_SIZE": "many"})
    assert "(from --lease-s)" in message
    assert "(from PD_BLOCK_SIZE)" in message


def test_an_unknown_key_names_the_file_and_the_likely_field(write_toml: WriteToml) -> None:
    path = write_toml("leas_s = 5")
    assert error_of([], toml=path) == f"unknown key leas_s in {path}; did you mean lease_s?"


def test_an_unknown_flag_names_the_likely_one() -> None:
    assert error_of(["--leas-s", "5"]) == "unknown flag --leas-s; did you mean --lease-s?"


def test_an_unknown_variable_names_the_likely_one() -> None:
    message = error_of([], {"PD_LEAS_S": "5"})
    assert message == "unknown environment variable PD_LEAS_S; did you mean PD_LEASE_S?"


def test_a_word_that_is_no_flag_is_refused() -> None:
    assert error_of(["--port", "1", "here"]) == "unexpected argument here"


@pytest.mark.parametrize("argv", [["--port"], ["--port", "--host", "::1"]])
def test_a_flag_without_its_value_is_refused(argv: list[str]) -> None:
    assert error_of(argv) == "--port needs a value"


def test_a_file_that_is_not_there_names_what_asked_for_it(tmp_path: Path) -> None:
    path = str(tmp_path / "none.toml")
    for message in (error_of(["--config", path]), error_of([], {"PD_CONFIG": path})):
        assert path in message
        assert "No such file" in message
    assert "--config" in error_of(["--config", path])
    assert "PD_CONFIG" in error_of([], {"PD_CONFIG": path})


def test_a_file_that_is_not_toml_names_the_line(write_toml: WriteToml) -> None:
    path = write_toml("port = 1\nlease_s = = 5")
    message = error_of([], toml=path)
    assert str(path) in message
    assert "line 2" in message


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'name = "caf\xe9"')
    assert f"{path} is not UTF-8" in error_of([], toml=path)


# --- one environment for several roles -----------------------------------------------------------


def test_variables_of_other_roles_and_of_the_client_are_no_error() -> None:
    environ = {"PD_BULK_PORT": "7000", "PD_ENDPOINT": "localhost:1", "HOME": "/", "PDX": "1"}
    assert load_settings(PrefillConfig, [], environ) == PrefillConfig()


def test_keys_of_other_roles_are_no_error_in_a_file(write_toml: WriteToml) -> None:
    path = write_toml('bulk_port = 7000\nprefill = ["a:1"]\nlease_s = 5')
    assert load_settings(PrefillConfig, [], {}, path) == PrefillConfig(lease_s=5)


# --- endpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--otlp", "--advertise", "--decode", "--prefill"])
def test_what_is_no_endpoint_is_refused_by_name(flag: str) -> None:
    name = flag.removeprefix("--")
    message = error_of([flag, "foo"], cls=RouterConfig)
    assert message == (
        f"{name} must be host:port (an IPv6 address in brackets), not 'foo' (from {flag})"
    )


# --- the reference table -------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_the_table_has_every_field_with_its_meaning(role: type[ServerConfig]) -> None:
    rows = settings_table(role)
    assert len(rows) == len(role.model_fields)
    assert all(row.description for row in rows)
    if role is RouterConfig:
        assert ("--prefill", "PD_PREFILL", "", "control endpoints of prefill instances") in rows
    assert ("--lease-s", "PD_LEASE_S", "15.0", role.model_fields["lease_s"].description) in rows


@pytest.mark.parametrize("role", ROLES)
def test_every_default_of_the_table_means_the_default(role: type[ServerConfig]) -> None:
    environ = {row.env: row.default for row in settings_table(role)}
    assert load_settings(role, [], environ) == role()


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_every_setting_and_exits_well(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_settings(DecodeConfig, ["--lease-s", "-1", flag], {})
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert printed.rstrip("\n") == settings_help(DecodeConfig)
    for row in settings_table(DecodeConfig):
        (line,) = [text for text in printed.splitlines() if text.split()[0] == row.flag]
        assert all(cell in line for cell in row[:3])
        assert row.description in " ".join(printed.split())


@pytest.mark.parametrize("role", ROLES)
def test_help_fits_a_terminal_and_shows_what_can_be_chosen(role: type[ServerConfig]) -> None:
    text = settings_help(role)
    assert max(map(len, text.splitlines())) <= 100
    assert "how log lines look (human, json)" in " ".join(text.split())
    assert "(torch, sim)" in text
