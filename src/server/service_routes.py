"""The routes of the service itself, of its GPUs and nodes."""

from __future__ import annotations

from ..hosting.observer import SMI_WAIT_S
from ..opening import TYPE_CHECKING, __version__
from ..service.access import Identity
from ..service.health import health_json
from ..values.choice import Choice
from ..values.config import parse_node
from ..values.value import replace
from ..views.openapi import make_openapi
from ..views.prometheus import format_prometheus, list_metrics
from .api import Api
from .routes import ROUTES, Request, Response, json_response, page_response, route

if TYPE_CHECKING:
    from typing import Any

NEWS_TIMEOUT_S = 15.0                   # GET /status?after= replies at the latest after this time
NEWS_LOOK_S = 5.0               # between two looks for what is no change of State: GPUs, nodes, jobs' last lines
# What is told with other news, or after NEWS_TIMEOUT_S: it changes all the time.
UNIMPORTANT = {"state_version", "is_whole", "readings", "host"}


def compress(response: Response, request: Request) -> Response:
    """The reply in a fifth of its bytes, for a caller that takes it so: a long list of numbers is asked for again."""
    import zlib
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return response
    packer = zlib.compressobj(wbits=31)                     # in the form of gzip
    headers = {"Content-Encoding": "gzip", "Vary": "Accept, Accept-Encoding, Authorization"}
    return replace(response, body=packer.compress(response.body) + packer.flush(),
                   headers={**response.headers, **headers})


@route("GET /", "user", "name and version of what answers here; a browser gets the dashboard", "Info")
def get_info(api: Api, caller: Identity) -> dict[str, Any]:
    if not caller.is_owner:
        return {"name": "nexus", "version": __version__, "user": caller.user}
    calls = [f"{row.method} {row.pattern}: {row.summary}" for row in ROUTES if row.summary]
    return {"name": "nexus", **api.service.status.describe_service(), "calls": calls}


@route("GET /status", "user", "GPUs, running jobs, and how many wait; with `after`: what has changed since then",
       "Status")
def get_status(api: Api, caller: Identity, choice: Choice, after: int | None = None,
               limit: int = 50) -> Response | dict[str, Any]:
    api.service.gpu_watch.first_probe.wait(SMI_WAIT_S + 5)
    if after is None:
        return api.service.status.describe_for(caller)
    clock, store, overview = api.service.clock, api.service.store, api.service.overview
    looked: tuple[int | None, float] = None, 0.0                # the version, and when to look again

    def find_news() -> dict[str, Any] | None:
        nonlocal looked
        if store.version == looked[0] and clock.monotonic() < looked[1]:
            return None
        changes = overview.find_changes(after, caller, choice, limit)
        looked = store.version, clock.monotonic() + NEWS_LOOK_S
        return changes if changes["is_whole"] or not changes.keys() <= UNIMPORTANT else None

    return api.reply_when(caller, find_news, NEWS_TIMEOUT_S,
                          lambda: overview.find_changes(after, caller, choice, limit))


@route("GET /metrics", "user", "GPUs, nodes, jobs, their ends, and the checks of health, for Prometheus", "text/plain")
def get_metrics(api: Api, caller: Identity) -> Response:
    end_counts = dict(api.service.end_counts)              # it grows as jobs end
    checks = api.service.health.list_checks()
    text = format_prometheus(list_metrics(api.service.status.describe(checks), health_json(checks), end_counts))
    return Response(200, text.encode("utf-8", "replace"), "text/plain; version=0.0.4; charset=utf-8")


@route("GET /health", "user", "each check with its reading; 503 when one is bad", "Health", statuses=(200, 503))
def get_health(api: Api, caller: Identity) -> Response:
    api.service.gpu_watch.first_probe.wait(SMI_WAIT_S + 5)
    health = api.service.health.check()
    if not caller.is_owner:
        health.update(checks=[{**row, "reading": ""} for row in health["checks"]], disk_use=None)
    return json_response(health, 200 if health["is_healthy"] else 503)


@route("POST /service/stop", "owner", "end the service; jobs go on")
def post_stop(api: Api, caller: Identity) -> Response:
    api.service.log.info("Service stopped by %s", caller.name)
    return Response(204, after=api.service.stop)


@route("GET /openapi.json", "anyone", "this description", "any")
def get_openapi(api: Api, caller: Identity) -> Response:
    if api.openapi is None:                        # cached: anyone may ask, as often as they like
        api.openapi = json_response(make_openapi(ROUTES, __version__))
    return api.openapi


# Routes that only pass on their arguments

route("GET /docs", "anyone", "openapi.json to read, with a form to try each call", "text/html")(
    lambda api, caller: page_response(api.page))                # the page looks at its address
route("POST /service/pause", "owner", "start nothing new, or nothing of a group")(
    lambda api, caller, group=None: api.service.editor.set_paused(True, caller.name, group))
route("POST /service/resume", "owner", "start jobs again")(
    lambda api, caller, group=None: api.service.editor.set_paused(False, caller.name, group))
route("GET /gpus/history", "user", "what each GPU did, for up to 31 days, and what ran on it, for 7", "History")(
    lambda api, caller, request, since=None, hours=None, step=None, series=(), merge=0.0:
    compress(json_response(api.service.gpu_history.describe(
        caller, 3600.0 * hours if hours else since, step, series, merge)), request))
route("POST /gpus/{index}/pause", "owner", "give a GPU no new job")(
    lambda api, caller, index: api.service.gpu_watch.set_gpu_paused(index, True, caller.name))
route("POST /gpus/{index}/resume", "owner", "give it jobs again")(
    lambda api, caller, index: api.service.gpu_watch.set_gpu_paused(index, False, caller.name))
route("GET /nodes", "owner", "this machine and the others that jobs are given to", "NodeInfo[]")(
    lambda api, caller: api.service.pool.list_nodes())
route("POST /nodes", "owner", "give jobs to another machine too, on which nexus is (nexus node add puts it there)",
      body="NodeAdded")(
    lambda api, caller, body: api.service.pool.add_node(parse_node(body), caller.name))
route("DELETE /nodes/{name}", "owner", "give a machine no more jobs; it is forgotten after its last one")(
    lambda api, caller, name, force=False: api.service.pool.remove_node(name, force, caller.name))
