"""Who Prefect's and MLflow's servers answer."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GUARDED, RUNNERS = "tests/flows/test_guarded.py", "tests/flows/test_runners.py"
TEMPORARY = "test_a_temporary_server_hears_no_signal_to_the_group_and_ends_with_a_flow_that_was_killed"
MUTANTS = (
    Mutant(
        "any_origin_asks",
        "a web page that the owner opens would write with the password that the browser knows",
        "flows/guarded.py",
        'origin not in (None, f"http://{host}")',
        "origin not in (None, origin)",
        (f"{GUARDED}::test_other_hosts_and_origins_are_refused",),
    ),
    Mutant(
        "any_host_that_begins_well",
        "a name like 127.0.0.1.evil.example can be made to mean this machine",
        "flows/guarded.py",
        "_OWN_HOST.fullmatch(host)",
        "_OWN_HOST.match(host)",
        (f"{GUARDED}::test_other_hosts_and_origins_are_refused",),
    ),
    Mutant(
        "no_password_of_mlflow",
        "any user of the machine would read and delete runs",
        "flows/guarded.py",
        "self.expected is not None and not",
        "self.expected is None and not",
        (f"{GUARDED}::test_a_password_is_asked_for",),
    ),
    Mutant(
        "web_sockets_of_any_page",
        "a web page would read every event and log line",
        "flows/guarded.py",
        'in ("http", "websocket") else None',
        'in ("http",) else None',
        (f"{GUARDED}::test_web_sockets_are_guarded_too",),
    ),
    Mutant(
        "a_setting_that_prefect_does_not_know",
        "Prefect ignores it, and with it the protection",
        "flows/guarded.py",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED",
        "PREFECT_SERVER_API_CSRF_ENABLED",
        (f"{GUARDED}::test_prefect_knows_its_settings",),
    ),
    Mutant(
        "temporary_server_without_password",
        "any user of the machine would rewrite what the owner's next run executes",
        "flows/server.py",
        "**env, **prefect_settings(password)}",
        "**env}",
        (f"{RUNNERS}::{TEMPORARY}",),
    ),
    Mutant(
        "any_process_on_the_servers_port",
        "another user's server would answer the owner's flow",
        "flows/server.py",
        "if server.server_process is None or not listens(server.server_process.pid, server.port or 0):",
        "if server.server_process is None:",
        (f"{RUNNERS}::test_a_flow_asks_no_server_that_took_its_own_ones_port",),
    ),
)
