"""examples/observability/rules.yaml: what its alerts say of given series, and of four ranks in a real Prometheus."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import prometheus_process
import pytest
import scraped
import yaml
from dashboards import EXAMPLE, RULES, promql, rules

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
LATE = "2"
TEN_MINUTES = 600.0
"""Four ranks begin late on a busy machine."""
NEEDS_MORE = {"TorchHang", "TorchInputBound", "TorchSlowerThanYesterday", "TorchMemoryGrows"}
"""Alerts that four ranks of which one is late do not raise: without a hang, for a day, or with a GPU."""


def test_rules_raise_what_their_tests_say():
    """``promtool test rules``: each alert is raised where it is to be, with its text, and not beside that."""
    promtool = prometheus_process.promtool()
    if promtool is None:
        pytest.skip(prometheus_process.NO_PROMTOOL)
    for command in ("check", "test"):
        file = RULES if command == "check" else EXAMPLE / "rules-test.yaml"
        done = subprocess.run([promtool, command, "rules", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test():
    """No alert is added that rules-test.yaml does not raise."""
    tests = yaml.safe_load((EXAMPLE / "rules-test.yaml").read_text("utf-8"))["tests"]
    raised = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert raised == {name for name, _ in rules() if ":" not in name}


@pytest.fixture
def ranks(tmp_path):
    """A Prometheus that has the rules, hurried, and scrapes what four ranks send."""
    binary = prometheus_process.any_prometheus()
    if binary is None:
        pytest.skip(prometheus_process.NO_PROMETHEUS_AT_ALL)
    hurried = RULES.read_text("utf-8").replace("interval: 15s", "interval: 1s").replace("interval: 1m", "interval: 1s")
    (tmp_path / "rules.yaml").write_text(hurried.replace("offset 4m", "offset 5s"))
    with scraped.serving() as (_, port):
        jobs = [{"job_name": "all", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]
        configuration = tmp_path / "prometheus.yaml"
        settings = {"global": {"scrape_interval": "1s"}, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
        configuration.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", HERE / "late_program.py"]
        path = os.pathsep.join(map(str, (TESTS.parent, TESTS / "torch")))
        with prometheus_process.running(binary, tmp_path, configuration) as found:
            process = subprocess.Popen(
                [*command, tmp_path, f"http://127.0.0.1:{port}/v1/metrics"],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            try:
                yield found
            finally:
                (tmp_path / "stop").touch()
                process.wait(TEN_MINUTES)


@pytest.mark.exhaustive  # windows of minutes have to pass
def test_the_late_rank_is_named(ranks):
    """Of four ranks, the alert names the one for which the others wait; every other expression returns data, too."""

    def firing():
        alerts = ranks.ask("alerts")["alerts"]
        return [each["labels"] for each in alerts if each["state"] == "firing"]

    prometheus_process.until(firing, lambda: str(ranks.ask("alerts")), TEN_MINUTES)
    assert {(each["alertname"], each["torch_distributed_rank"]) for each in firing()} == {("TorchStraggler", LATE)}
    empty = dict([*promql("ranks", job="ranks", run=".*"), *rules()])

    def all_have_data():
        for name, query in list(empty.items()):
            if name in NEEDS_MORE or "offset 1d" in query or ranks.values(query):
                del empty[name]
        return not empty

    prometheus_process.until(all_have_data, lambda: f"nothing in {list(empty)}", TEN_MINUTES)
