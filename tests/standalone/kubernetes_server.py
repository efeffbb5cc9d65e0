"""A stand-in for Kubernetes on loopback: an API server that runs the pods of executors as processes of this machine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.standalone.cluster import SPARK_HOME
from tests.standalone.submitting import environment

DRIVER_POD = "sparkdl-training-driver"
_POD_IP = "127.0.0.1"
_WATCHED_S = 30.0
_EXECUTOR = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"


class KubernetesServer:
    """The part of Kubernetes' API that Spark uses in client mode, running until the end of the block.

    A pod that is created is started as a process, as the entry point of Spark's image starts an executor, and killed
    when it is deleted. It knows the pod of the driver, which is ready.

    Args:
        folder: folder for the files of the pods.

    Attributes:
        created: the objects that were posted, by kind.
        url: value of ``spark.master``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.created: dict[str, list[dict[str, Any]]] = {}
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._versions = itertools.count(1)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._is_ended = False
        self._server = ThreadingHTTPServer((_POD_IP, 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"k8s://http://{_POD_IP}:{self._server.server_port}"

    def __enter__(self) -> KubernetesServer:
        driver = {
            "kind": "Pod",
            "metadata": {"name": DRIVER_POD, "labels": {"app": "sparkdl", "role": "driver"}},
            "spec": {"containers": [{"name": "driver", "image": "sparkdl"}]},
        }
        self.add("pods", driver)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        for name in list(self._processes):
            self._kill(name)
        self._server.shutdown()
        self._server.server_close()

    def logs(self) -> str:
        """What the pods have printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def names(self, kind: str) -> list[str]:
        """The names of the objects of a kind that are there."""
        with self._changed:
            return [name for plural, name in self._objects if plural == kind]

    def add(self, kind: str, created: dict[str, Any]) -> dict[str, Any]:
        """Add an object as the API does; the pod of an executor is started."""
        metadata = created["metadata"]
        with self._changed:
            number = next(self._versions)
            metadata.update(
                uid=f"uid-{number}", namespace="default", creationTimestamp="2026-01-01T00:00:00Z"
            )
            self.created.setdefault(kind, []).append(created)
            self._objects[kind, metadata["name"]] = created
            if kind == "pods":
                created["status"] = {
                    "phase": "Running",
                    "podIP": _POD_IP,
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [
                        {
                            "name": created["spec"]["containers"][0]["name"],
                            "ready": True,
                            "restartCount": 0,
                            "image": "",
                            "imageID": "",
                            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                        }
                    ],
                }
            self._publish("ADDED", kind, created)
            if kind == "pods" and metadata["name"] != DRIVER_POD:
                self._start(created)
        return created

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if there is none."""
        with self._changed:
            return self._objects.get((kind, name))

    def find(self, kind: str, selector: str) -> list[dict[str, Any]]:
        """Return the objects of a kind with labels as in ``a=b,c=d``; conditions of other forms hold for all."""
        wanted = dict(
            part.split("=") for part in selector.split(",") if part.count("=") == 1 and "!" not in part
        )
        with self._changed:
            return [
                objects
                for (plural, _), objects in self._objects.items()
                if plural == kind and wanted.items() <= objects["metadata"].get("labels", {}).items()
            ]

    def delete(self, kind: str, name: str) -> None:
        """Delete an object; the process of a pod is killed."""
        with self._changed:
            deleted = self._objects.pop((kind, name), None)
            if deleted is None:
                return
            self._kill(name)
            self._publish("DELETED", kind, deleted)

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the changes of objects of a kind, from the first on, for at most half a minute."""
        deadline = time.monotonic() + _WATCHED_S
        sent = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda seen=sent: self._is_ended or len(self._events) > seen, deadline - time.monotonic()
                )
                new, sent = self._events[sent:], len(self._events)
                if self._is_ended or time.monotonic() > deadline:
                    return
            yield from (event["event"] for event in new if event["kind"] == kind)

    def _publish(self, change: str, kind: str, changed: dict[str, Any]) -> None:
        changed["metadata"]["resourceVersion"] = str(next(self._versions))
        changed.setdefault("apiVersion", "v1")
        copied = json.loads(json.dumps(changed))
        self._events.append({"kind": kind, "event": {"type": change, "object": copied}})
        self._changed.notify_all()

    def _start(self, pod: dict[str, Any]) -> None:
        """Start the process of an executor, as ``/opt/entrypoint.sh executor`` of Spark's image does."""
        name = pod["metadata"]["name"]
        (container,) = pod["spec"]["containers"]
        assert container["args"] == ["executor"]
        variables = {item["name"]: item.get("value", _POD_IP) for item in container["env"]}
        options = [value for key, value in variables.items() if key.startswith("SPARK_JAVA_OPT_")]
        local = self.folder / name
        local.mkdir(parents=True)
        memory = variables["SPARK_EXECUTOR_MEMORY"]
        command = [
            "java",
            *options,
            *(f"-Xms{memory}", f"-Xmx{memory}", "-cp", str(SPARK_HOME / "jars" / "*"), _EXECUTOR),
            *("--driver-url", variables["SPARK_DRIVER_URL"]),
            *("--executor-id", variables["SPARK_EXECUTOR_ID"]),
            *("--cores", variables["SPARK_EXECUTOR_CORES"]),
            *("--app-id", variables["SPARK_APPLICATION_ID"]),
            *("--hostname", _POD_IP, "--resourceProfileId", variables["SPARK_RESOURCE_PROFILE_ID"]),
            *("--podName", name),
        ]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=local,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment(
                    **{**variables, "SPARK_LOCAL_DIRS": str(local), "SPARK_CONF_DIR": str(local)}
                ),
            )

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _handler(server: KubernetesServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            kind, name, query = self._target()
            selector = query.get("labelSelector", "")
            if query.get("watch") == "true" and "Upgrade" in self.headers:
                self._answer(200, {})  # no WebSocket: the client watches by a request that stays open
            elif query.get("watch") == "true":
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                try:
                    for event in server.events(kind):
                        self.wfile.write(json.dumps(event).encode() + b"\n")
                        self.wfile.flush()
                except OSError:  # the client has gone
                    return
            elif name is None:
                found = {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
                self._answer(200, {**found, "items": server.find(kind, selector)})
            else:
                self._answer_with(server.get(kind, name))

        def do_POST(self) -> None:
            kind, _, _ = self._target()
            self._answer(201, server.add(kind, self._body()))

        def do_PATCH(self) -> None:
            kind, name, _ = self._target()
            self._body()
            self._answer_with(server.get(kind, name or ""))

        do_PUT = do_PATCH

        def do_DELETE(self) -> None:
            kind, name, query = self._target()
            self._body()
            chosen = server.find(kind, query.get("labelSelector", "")) if name is None else [name]
            for item in chosen:
                server.delete(kind, item if isinstance(item, str) else item["metadata"]["name"])
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

        def _target(self) -> tuple[str, str | None, dict[str, str]]:
            """The kind and the name of the object in the path, and the query."""
            parts = urlsplit(self.path)
            _, _, rest = parts.path.partition("/namespaces/default/")
            kind, _, name = rest.partition("/")
            return kind, name or None, {key: values[0] for key, values in parse_qs(parts.query).items()}

        def _body(self) -> dict[str, Any]:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body: dict[str, Any] = json.loads(content or b"{}")
            return body

        def _answer_with(self, found: dict[str, Any] | None) -> None:
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
            self._answer(404 if found is None else 200, missing if found is None else found)

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler
