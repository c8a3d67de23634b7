#!/usr/bin/env python3
"""A Faena worker over the WebSocket. Needs Python 3.9 and the package websockets.

    pip install websockets && python3 examples/python-websockets/worker.py
"""
from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import uuid
from typing import Any, Awaitable, Callable, Optional

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

Json = dict[str, Any]

URL = os.environ.get("FAENA_URL", "http://127.0.0.1:3000").rstrip("/").replace("http", "ws", 1) + "/api/v1/workers/connect"
TOKEN = os.environ.get("FAENA_TOKEN")
CONCURRENCY = 8


class Failed(Exception):
    """An error with which a handler controls retries. Any other error that a handler raises is retried."""

    def __init__(self, message: str, retryable: bool = True, retry_after_ms: Optional[int] = None) -> None:
        super().__init__(message)
        self.retryable, self.retry_after_ms = retryable, retry_after_ms


# ------------------------------------------------------------- your handlers


async def greet(job: Job, payload: Json) -> Json:
    if not payload.get("name"):
        raise Failed("the name is empty", retryable=False)
    await job.progress({"phase": "greeting", "percentage": 50})

    async def make_greeting() -> str:
        return "Hello, " + str(payload["name"])

    # A step that an earlier run has completed does not run again; its stored result is used.
    greeting = await job.step("greeting", make_greeting)
    try:  # long work ends early if the job was cancelled
        await asyncio.wait_for(job.cancelled.wait(), payload.get("seconds", 0))
    except asyncio.TimeoutError:
        pass
    return {"greeting": greeting}


HANDLERS: dict[str, Callable[[Job, Json], Awaitable[Any]]] = {"greet": greet}

# --------------------------------------------------- the same for all handlers


class Rejected(Exception):
    """The server rejected a report: the job has been assigned to another worker."""


class Unavailable(Exception):
    """The server is starting or stopping: the worker connects again."""


class Job:
    """One run of one job."""

    def __init__(self, worker: Worker, data: Json) -> None:
        self.worker = worker
        self.id: str = data["id"]
        self.run: int = data["run"]
        self.type: str = data["type"]
        self.payload: Json = data["payload"]
        self.steps: Json = {step["name"]: step["result"] for step in data.get("steps", [])}
        self.cancelled = asyncio.Event()  # check it in long work

    async def progress(self, progress: Json) -> None:
        await self.worker.send({"type": "progress", "jobId": self.id, "run": self.run, "progress": progress})

    async def step(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        if name not in self.steps:
            result = await work()
            await self.report("step", name=name, result=result)
            self.steps[name] = result
        return self.steps[name]

    async def report(self, kind: str, **fields: Any) -> None:
        """Sends a report and returns when the server has acknowledged it, over this connection or a later one."""
        frame = {"type": kind, "jobId": self.id, "run": self.run, **fields}
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.worker.reports.append((frame, acknowledged))
        await self.worker.send(frame)
        await acknowledged


class Worker:
    def __init__(self) -> None:
        # The id stays the same after a reconnect, so that running jobs stay with this worker. A worker pool sets it for its processes.
        self.id = os.environ.get("FAENA_WORKER_ID") or str(uuid.uuid4())
        self.session_token: Optional[str] = os.environ.get("FAENA_SESSION_TOKEN")
        self.socket: Optional[ClientConnection] = None
        self.jobs: dict[str, Job] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.reports: list[tuple[Json, asyncio.Future[None]]] = []  # not acknowledged yet
        self.stopping = asyncio.Event()
        self.draining = asyncio.Event()  # set while no more jobs are wanted, by this worker or by the server

    def stop(self) -> None:
        self.stopping.set()
        self.draining.set()

    async def send(self, frame: Json) -> None:
        """Sends a frame if there is a connection. Reports are sent again over the next one."""
        if self.socket:
            try:
                await self.socket.send(json.dumps(frame))
            except ConnectionClosed:
                pass

    async def work(self) -> None:
        """Keeps a connection until the worker has left. Survives restarts of the server: it keeps its id and its jobs."""
        delay = 0.1
        while not (self.draining.is_set() and not self.jobs):
            try:
                headers = {"authorization": "Bearer " + TOKEN} if TOKEN else None
                async with connect(URL, additional_headers=headers, max_size=2**24) as socket:
                    await self.run_connection(socket)
                    delay = 0.1
            except ConnectionClosed:
                delay = 0.1
            except (OSError, EOFError, asyncio.TimeoutError, InvalidHandshake, Unavailable) as error:
                print("not connected:", error, flush=True)
            finally:
                self.socket = None
            await asyncio.sleep(delay * random.uniform(0.5, 1))
            delay = min(delay * 2, 5)

    async def run_connection(self, socket: ClientConnection) -> None:
        # A job whose end is not acknowledged yet still counts as in flight.
        in_flight = [{"jobId": job.id, "run": job.run} for job in self.jobs.values()]
        register = {"type": "register", "workerId": self.id, "sessionToken": self.session_token, "name": "python-websockets",
                    "token": TOKEN, "inFlight": in_flight,
                    "capabilities": list(HANDLERS), "concurrency": CONCURRENCY}
        await socket.send(json.dumps({key: value for key, value in register.items() if value is not None}))
        answer = json.loads(await socket.recv())
        if answer["type"] == "error" and answer["error"]["code"] in ("UNAVAILABLE", "RATE_LIMITED", "CONFLICT"):
            raise Unavailable(answer["error"]["message"])
        if answer["type"] != "registered":
            raise SystemExit(f"rejected: {answer}")
        print("registered as", self.id, flush=True)
        self.session_token = answer.get("sessionToken")
        self.socket = socket
        if not answer.get("resumed"):
            for job in self.jobs.values():  # disconnected for too long: assigned to other workers
                job.cancelled.set()
        for frame, _ in list(self.reports):
            await self.send(frame)
        tasks = [asyncio.create_task(self.send_heartbeats(answer["heartbeatIntervalMs"] / 1000)), asyncio.create_task(self.drain(socket))]
        try:
            async for text in socket:
                self.handle(json.loads(text))
        finally:
            for task in tasks:
                task.cancel()

    def handle(self, frame: Json) -> None:
        kind = frame["type"]
        if kind == "job":
            job = Job(self, frame["job"])
            self.jobs[job.id] = job
            task = asyncio.create_task(self.run_job(job))
            self.tasks.add(task)  # the event loop keeps only a weak reference to a task
            task.add_done_callback(self.tasks.discard)
        elif kind == "ack":
            self.acknowledge(frame)
        elif kind == "cancel" and frame["jobId"] in self.jobs:
            self.jobs[frame["jobId"]].cancelled.set()
        elif kind == "drain":
            self.draining.set()
        elif kind == "resume" and not self.stopping.is_set():
            self.draining.clear()  # the drain was cancelled: the server assigns jobs again
        elif kind == "error":
            print("error:", frame["error"], flush=True)

    def acknowledge(self, ack: Json) -> None:
        for entry in self.reports:
            frame, acknowledged = entry
            if frame["jobId"] == ack["jobId"] and frame["type"] == ack.get("of") and frame["run"] == ack.get("run", frame["run"]):
                self.reports.remove(entry)
                if not acknowledged.done():
                    if ack.get("ok"):
                        acknowledged.set_result(None)
                    else:
                        acknowledged.set_exception(Rejected(ack.get("error")))
                return

    async def run_job(self, job: Job) -> None:
        try:
            result = await HANDLERS[job.type](job, job.payload)
            await job.report("complete", result=result)
        except Rejected as rejected:
            print(job.id, rejected, flush=True)
        except Exception as error:
            fields = {"error": str(error) or repr(error), "retryable": getattr(error, "retryable", True)}
            if getattr(error, "retry_after_ms", None):
                fields["retryAfterMs"] = getattr(error, "retry_after_ms")
            try:
                await job.report("fail", **fields)
            except Rejected as rejected:
                print(job.id, rejected, flush=True)
        finally:
            if self.jobs.get(job.id) is job:
                del self.jobs[job.id]

    async def send_heartbeats(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            await self.send({"type": "heartbeat"})

    async def drain(self, socket: ClientConnection) -> None:
        """Waits for a shutdown or a drain, lets the running jobs finish, and leaves, unless the drain is cancelled meanwhile."""
        while True:
            await self.draining.wait()
            if self.stopping.is_set():
                await self.send({"type": "drain"})
            while self.jobs and self.draining.is_set():
                await asyncio.wait(list(self.tasks), timeout=0.5)
            if self.draining.is_set():
                break
        await self.send({"type": "leave"})
        print("left", flush=True)
        await socket.close()


async def main() -> None:
    worker = Worker()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, worker.stop)
    working = asyncio.create_task(worker.work())
    stopping = asyncio.create_task(worker.stopping.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    if worker.socket or worker.jobs or working.done():
        await working
    # Otherwise there is no server to leave; asyncio.run ends the attempts to connect.


if __name__ == "__main__":
    asyncio.run(main())
