"""``deploy``: the files for containers, systemd and Kubernetes, by their schemas and by our own
parsers. No container is started."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.file import parse
from asyncspec_nodes.console.arguments import variable
from asyncspec_nodes.http.metrics import Metrics
from asyncspec_nodes.http.options import server_context
from asyncspec_nodes.node.command import build_parser
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.links import role_of
from asyncspec_protocol.messages import Status
from certificates import make_keys

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES = "1.34.0"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def node(words: list[str], environment: dict[str, str]) -> Any:
    """What ``asyncspec-node`` makes of its arguments and variables."""
    parser = build_parser()
    known = {variable(action) for action in parser._actions}
    ours = {name: text for name, text in environment.items() if name.startswith("ASYNCSPEC_")}
    assert set(ours) <= known | {"ASYNCSPEC_API_KEY"}
    parser.environment = environment
    return parser.parse_args(words)


STRINGS = {"type": "array", "items": {"type": "string"}}
# The part of the Compose Specification that the file uses; anything else is a mistake.
COMPOSE = {
    "type": "object",
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "required": ["services"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {
            "type": "object",
            "patternProperties": {
                "^[a-zA-Z0-9._-]+$": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "image": {"type": "string"},
                        "build": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "context": {"type": "string"},
                                "dockerfile": {"type": "string"},
                                "args": {
                                    "type": "object",
                                    "additionalProperties": {"type": ["string", "number"]},
                                },
                            },
                        },
                        "network_mode": {"type": "string"},
                        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
                        "stop_grace_period": {"type": "string", "pattern": r"^(\d+[smh])+$"},
                        "volumes": STRINGS,
                        "profiles": STRINGS,
                        "depends_on": {
                            "type": "object",
                            "additionalProperties": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    "condition": {
                                        "enum": [
                                            *("service_started", "service_healthy"),
                                            "service_completed_successfully",
                                        ]
                                    },
                                    "required": {"type": "boolean"},
                                },
                            },
                        },
                        "environment": {
                            "type": "object",
                            "additionalProperties": {"type": ["string", "number", "null"]},
                        },
                    },
                }
            },
        },
    },
}


def test_the_compose_file() -> None:
    file = DEPLOY / "docker" / "compose.yaml"
    found = yaml.safe_load(file.read_text())
    jsonschema.Draft202012Validator(COMPOSE).validate(found)
    for name, service in found["services"].items():
        assert service["network_mode"] == "host"
        assert service["volumes"]
        dockerfile = (file.parent / service["build"]["context"]).resolve()
        assert (dockerfile / service["build"]["dockerfile"]).is_file()
        default = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")
        values = {k: default.sub(r"\1", v) for k, v in service["environment"].items()}
        arguments = node([], values)
        assert (arguments.role == "draft") == (name == "draft")
        assert arguments.http
    # The draft node stops first; without its stage's profile it starts alone.
    draft, stage = found["services"]["draft"], found["services"]["stage"]
    assert draft["depends_on"]["stage"]["required"] is False
    assert not set(draft["profiles"]) & set(stage["profiles"])


def docker_steps() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their text."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


def test_the_dockerfile_builds_both_variants_from_files_that_exist() -> None:
    steps = docker_steps()
    known = "ARG FROM ENV RUN WORKDIR COPY USER VOLUME EXPOSE HEALTHCHECK ENTRYPOINT"
    assert {name for name, _ in steps} <= set(known.split())
    stages = [text.split(" AS ")[1] for name, text in steps if name == "FROM"]
    assert {"base-cpu", "base-cuda"} <= set(stages)
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    for name, text in steps:
        if name == "COPY":
            for source in text.split()[:-1]:
                assert (DEPLOY.parent / source).exists()
                assert f"!{source}" in ignored
    environment = dict(
        pair.split("=", 1) for name, text in steps if name == "ENV" for pair in shlex.split(text)
    )
    ours = {name: text for name, text in environment.items() if name.startswith("ASYNCSPEC_")}
    assert node(["--role", "verify", "--rank", "1", "--config", "x"], ours).http == 8000
    for name, text in steps:
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True)


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Quiet."""


@pytest.mark.parametrize("tls", [False, True])
def test_the_health_check_asks_where_the_node_serves(tls: bool, tmp_path: Path) -> None:
    check = [sys.executable, str(DEPLOY / "docker" / "health.py")]
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        given = {"ASYNCSPEC_HTTP": str(server.server_port), "ASYNCSPEC_HTTP_HOST": "0.0.0.0"}
        if tls:
            make_keys(tmp_path, "one")
            given["ASYNCSPEC_TLS_CERTIFICATE"] = str(tmp_path / "one.pem")
            context = server_context(tmp_path / "one.pem", tmp_path / "one.key")
            assert context is not None
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        subprocess.run(check, env=given, check=True, timeout=240)
        wrong = {"ASYNCSPEC_HTTP_HOST": "127.0.0.2"}
        assert subprocess.run(check, env={**given, **wrong}, timeout=240).returncode == 1
        server.shutdown()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_units(unit: Path, tmp_path: Path) -> None:
    found = configparser.RawConfigParser(strict=False)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(unit)
    lines = re.findall(r"^Environment=(.*)$", unit.read_text(), re.M)
    pairs = [pair.split("=", 1) for line in lines for pair in line.replace("%i", "2").split()]
    if unit.stem in ("asyncspec-up", "asyncspec-join"):
        # After a power cut a machine's address, or the cluster's first machine, comes later.
        assert found["Service"]["Restart"] == "always"
        assert "RestartPreventExitStatus" not in found["Service"]
        assert found["Unit"]["StartLimitIntervalSec"] == "0"
        assert found["Service"]["ExecStart"].split()[1] == unit.stem.removeprefix("asyncspec-")
    else:
        arguments = node([], dict(pairs))
        assert arguments.rank == (2 if "@" in unit.name else 0)
        assert found["Service"]["RestartPreventExitStatus"] == "2"
    # Units stop in reverse order: the draft node's answers need its stages to the end.
    assert found["Unit"].get("Before") == ("asyncspec-draft.service" if "@" in unit.name else None)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    program = tmp_path / "asyncspec-node"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    start = found["Service"]["ExecStart"].split()[0]
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(start, str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(rf"{unit.stem}.*(Unknown|Failed)", done.stderr)


MANIFEST = DEPLOY / "kubernetes" / "leaderworkerset.yaml"
# The part of the resource's definition that the file uses; the pods have their own schema.
LWS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}


def documents() -> dict[str, Any]:
    """The manifest's resources by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


def cluster() -> Config:
    """The manifest's cluster file, sound."""
    return parse(documents()["ConfigMap"]["data"]["cluster.toml"])


def test_the_manifest_fits_its_schemas() -> None:
    found = documents()
    for kind in ("ConfigMap", "PersistentVolumeClaim", "Service"):
        kubernetes_validate.validate(found[kind], KUBERNETES, strict=True)
    lws = found["LeaderWorkerSet"]
    jsonschema.Draft202012Validator(LWS).validate(lws)
    template = lws["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        metadata = {"name": "x", **template[name]["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        kubernetes_validate.validate(
            {**pod, "spec": template[name]["spec"]}, KUBERNETES, strict=True
        )
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {"containrs": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("index", range(4))
def test_pods_are_the_nodes_of_the_cluster_file(index: int) -> None:
    """Pod ``index`` of the group, as LeaderWorkerSet makes it, is a node that the file lists."""
    lws, config = documents()["LeaderWorkerSet"], cluster()
    template = lws["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 1 + config.stages
    assert template["restartPolicy"] == "None"
    pod = template["workerTemplate" if index else "leaderTemplate"]["spec"]
    (container,) = pod["containers"]
    words = [word.replace("$(LWS_WORKER_INDEX)", str(index)) for word in container["args"]]
    values = {one["name"]: one["value"] for one in container["env"]}
    arguments = node(words, values)
    assert arguments.role == role_of(arguments.rank, config.stages)
    at = config.at(arguments.rank)
    name = lws["metadata"]["name"]
    assert at.host == f"{name}-0{f'-{index}' if index else ''}.{name}"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"node": at.port, "http": arguments.http}
    for probe, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
        asked = container[f"{probe}Probe"]["httpGet"]
        assert (asked["path"], asked["port"]) == (path, "http")
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_a_stage_that_is_told_to_stop_waits_for_its_sessions() -> None:
    """The hook's command beside a stage's metrics: it asks until no session is left."""
    left = [12, 1, 0]

    class Stage(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            status = Status(0, Rank(2), "verify", (4, 8), 9.0, 3.0, 2_000_000, left.pop(0), 2, 30)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(Metrics().text((status,), ""))

        def log_message(self, *words: object) -> None:
            """Quiet."""

    worker = documents()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    (container,) = worker["spec"]["containers"]
    python, option, hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python"
    with HTTPServer(("127.0.0.1", 0), Stage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hook = hook.replace(":8000/", f":{server.server_port}/")
        subprocess.run([sys.executable, option, hook], check=True, timeout=240)
        server.shutdown()
    assert not left


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ([], "asyncspec-node"),
        (["--role", "draft"], "asyncspec-node"),
        (["serve", "--port", "1"], "asyncspec"),
        (["up"], "asyncspec"),
        (["join", "a b"], "asyncspec"),
    ],
)
def test_the_image_runs_nodes_and_commands(words: list[str], program: str, tmp_path: Path) -> None:
    for name in ("asyncspec", "asyncspec-node"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    entry = [str(DEPLOY / "docker" / "entry.sh"), *words]
    ran = subprocess.run(entry, env={"PATH": path}, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [program, *words]


def test_pods_keep_models_and_have_few_rights() -> None:
    template = documents()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    claim = documents()["PersistentVolumeClaim"]["metadata"]["name"]
    for name in ("leaderTemplate", "workerTemplate"):
        pod = template[name]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"] == {"claimName": claim}
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
