"""Replicas whose slice is lost, and starts that take long; in place of Ray a fake."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tpuport.cli.batches import cluster, ray_replicas
from tpuport.cli.batches.cluster import Reserved, slice_of
from tpuport.cli.batches.ray_replicas import RayReplicas
from tpuport.core.run.progress import Display
from tpuport.errors import TpuportError, UsageError


class FakeRay:
    """A call ends once the test says how."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.names: dict[int, tuple[str, Any]] = {}
        self.ends: dict[int, Any] = {}
        self.killed = 0

    def remote(self, *made: Any, **options: Any) -> Any:
        def asked(*given: Any) -> int:
            number = next(self.numbers)
            self.names[number] = ("search", given)
            return number

        def actor(**place: Any) -> Any:
            def method(name: str) -> Any:
                def call(*given: Any) -> int:
                    number = next(self.numbers)
                    self.names[number] = (name, (place["place"], *given))
                    return number

                return SimpleNamespace(remote=call)

            methods = {name: method(name) for name in ("address", "start", "make")}
            return SimpleNamespace(remote=lambda: SimpleNamespace(**methods))

        if options:
            return lambda function: SimpleNamespace(remote=asked)
        return SimpleNamespace(
            options=lambda max_restarts, max_task_retries, **place: actor(**place)
        )

    def calls(self, name: str) -> dict[int, Any]:
        """What was given to the calls of a name that have not ended."""
        names = self.names.items()
        return {n: g for n, (own, g) in names if own == name and n not in self.ends}

    def end(self, name: str, result: Any = None) -> None:
        self.ends |= dict.fromkeys(self.calls(name), result)

    def wait(self, refs: list[int], num_returns: int = 1, timeout: float = 0) -> Any:
        return [n for n in refs if n in self.ends][:num_returns], []

    def get(self, ref: int) -> Any:
        if isinstance(found := self.ends[ref], Exception):
            raise found
        return found

    def kill(self, actor: Any) -> None:
        self.killed += 1


class Held(Reserved):
    """Two hosts of a slice that a test may take away."""

    def __init__(self, name: str) -> None:
        super().__init__(places=[{"place": f"{name}-{n}"} for n in range(2)])
        self.__dict__.update(gone=False, freed=0)

    @property
    def lost(self) -> bool:
        return bool(self.__dict__["gone"])

    def free(self) -> None:
        self.__dict__["freed"] += 1


class Made:
    """A replica on a fake, and what people are told."""

    def __init__(self) -> None:
        self.ray, self.held, self.said = FakeRay(), Held("first"), list[str]()
        show = Display(lambda: None)
        show.say = self.said.append  # type: ignore[method-assign,assignment]
        where = slice_of("local", None, "v4-16")
        self.replicas = RayReplicas(self.ray, where, [self.held], 7, show, debug=False)

    def wait(self, times: int = 3) -> None:
        for _ in range(times):
            assert self.replicas.wait() == []


def test_a_replica_whose_slice_is_lost_starts_in_another() -> None:
    made = Made()
    ray, held = made.ray, made.held
    starts = list(ray.calls("start").values())
    assert [(place, *rest[2:]) for place, *rest in starts] == [
        ("first-0", 0, 7, 0, 2),
        ("first-1", 0, 7, 1, 2),
    ]
    ray.end("start", RuntimeError("the process died"))
    made.wait()
    again = [place for place, *_ in ray.calls("start").values()]
    assert (again, held.__dict__["freed"]) == (["first-0", "first-1"], 0)
    held.__dict__["gone"] = True
    ray.end("start", RuntimeError("the host died"))
    made.wait()
    assert (ray.calls("start"), held.__dict__["freed"]) == ({}, 1)
    assert made.said == ["replica 1: its slice is gone; waiting for another"]
    ray.end("search", None)  # none is free: the search goes on
    made.wait()
    assert len(ray.calls("search")) == 1
    ray.end("search", Held("second"))
    made.wait()
    assert [p for p, *_ in ray.calls("start").values()] == ["second-0", "second-1"]
    ray.end("start")
    made.wait()
    assert made.replicas.idle() == [0]


def test_a_search_that_fails_ends_the_batch() -> None:
    made = Made()
    made.held.__dict__["gone"] = True
    made.ray.end("start", RuntimeError("the host died"))
    made.wait()
    made.ray.end("search", RuntimeError("no label"))
    made.wait()
    made.ray.end("search", RuntimeError("no label"))
    with pytest.raises(TpuportError, match="replicas do not start: no label"):
        made.wait()


@pytest.mark.parametrize(
    ("there", "why"),
    [(False, "the cluster has no room"), (True, "the processes still import")],
)
def test_a_long_start_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, there: bool, why: str
) -> None:
    monkeypatch.setattr(ray_replicas, "LONG", 0.0)
    made = Made()
    if there:
        made.ray.end("address", ("127.0.0.1", 1))
    made.wait()
    (told,) = made.said
    assert told.startswith(f"replica 1: not started yet: {why}")
    made.held.__dict__["gone"] = True
    made.wait(1)
    assert len(made.ray.calls("search")) == (not there)
    assert made.ray.killed == (0 if there else 2)


def test_what_ray_says_of_a_slice_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tpu = pytest.importorskip("ray.util.tpu")
    where = slice_of("local", None, "v4-16")
    assert where.resource == "TPU-v4-16-head"

    def fails(error: Exception) -> None:
        def made(**given: Any) -> None:
            raise error

        monkeypatch.setattr(tpu, "SlicePlacementGroup", made)

    for error in (RuntimeError("no name"), ValueError("no name")):
        fails(error)
        with pytest.raises(UsageError, match=r"--topology v4-16: .*\(no name\); look"):
            cluster.reserved_again(where)
    fails(TimeoutError())
    assert cluster.reserved_again(where) is None
    with pytest.raises(UsageError, match="no slice is free"):
        cluster.reserved(where)


def test_the_wait_for_hosts_is_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUPORT_HOSTS_WAIT", "1")
    cause = SimpleNamespace(cause=TpuportError("process 1 did not come; open ports"))
    error = type("TaskError", (Exception,), vars(cause))()
    assert cluster.why_of(error) == "process 1 did not come; open ports"
    monkeypatch.setenv("TPUPORT_HOSTS_WAIT", "soon")
    where = slice_of("local", None, "cpu-hosts-2")
    made = ray_replicas.ray_replicas("local", 1, where, Display(), debug=False)
    with pytest.raises(UsageError, match="TPUPORT_HOSTS_WAIT='soon'"), made:
        pass
