"""compose.yaml, and what Prometheus and Grafana are given: every place that one names exists."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose import COMPOSE, SERVER, read, services
from tests.deploy.dockerfile import ROOT, instructions

PROMETHEUS = ROOT / "deploy/prometheus/prometheus.yml"
GRAFANA = ROOT / "deploy/grafana"


def yaml_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def mounts(service: str) -> dict[str, Path]:
    """Place in the container -> folder or file of the checkout."""
    split = (one.split(":") for one in services()[service]["volumes"])
    return {place: ROOT / source for source, place, *_ in split if source.startswith(".")}


def test_docker_compose_reads_it() -> None:
    command = ["docker", "compose", "-f", str(COMPOSE), "config", "--quiet"]
    there = shutil.which("docker") and subprocess.run(
        ["docker", "compose", "version"], capture_output=True
    )
    if not there or there.returncode:
        pytest.skip("needs docker compose")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_reads_the_configuration(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("needs promtool")
    text = PROMETHEUS.read_text(encoding="utf-8")
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/", f"{tmp_path}/"))
    (tmp_path / "metrics-key").write_text("none")
    command = [promtool, "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_whatever_is_mounted_is_there() -> None:
    for name in services():
        assert all(path.exists() for path in mounts(name).values()), name
    assert all((ROOT / one["file"]).is_file() for one in read()["secrets"].values())


def test_ports_are_those_of_this_machine_only() -> None:
    for name, service in services().items():
        assert service["ports"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name


def test_no_container_can_get_more_rights() -> None:
    for name, service in services().items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_prometheus_finds_the_server_and_its_key() -> None:
    server, prometheus = services()[SERVER], services()["prometheus"]
    (port,) = (one.value for one in instructions() if one.name == "EXPOSE")
    (job,) = yaml_of(PROMETHEUS)["scrape_configs"]
    # The name is also the container's own: a server checks the header Host.
    assert job["static_configs"] == [{"targets": [f"{server['hostname']}:{port}"]}]
    assert server["hostname"] == SERVER
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    (secret,) = prometheus["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert mounts("prometheus")["/etc/prometheus/prometheus.yml"] == PROMETHEUS


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    grafana = services()["grafana"]
    inside = mounts("grafana")
    assert inside["/etc/grafana/provisioning"] == GRAFANA / "provisioning"
    (source,) = yaml_of(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert services()["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    interval = yaml_of(PROMETHEUS)["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = yaml_of(GRAFANA / "provisioning/dashboards/glm-multiuser.yaml")["providers"]
    assert inside[provider["options"]["path"]] == GRAFANA / "dashboards"
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (inside[str(home.parent)] / home.name).is_file()
