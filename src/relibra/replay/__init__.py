"""Record the routing of a transformers model and replay it while training; importing this loads torch.

In: a model, and for replay a `RoutingTrace`. Out: expert ids, or a forward pass that takes recorded experts. Open
`replay.py` first.

record_routing(model)          which experts every token takes: a trace, or one tensor per forward pass
BatchRoutes                    recorded routes, laid out as the rows of a training batch
replay_routing(model, routes)  take those experts again, with live gate weights and gradients to the router
find_routers(model)            the routers of a model and the rule each follows
"""

from relibra.errors import missing_packages

with missing_packages(__name__):
    from relibra.replay.batch import BatchRoutes
    from relibra.replay.record import RoutingRecorder, record_routing
    from relibra.replay.replay import RoutingReplay, replay_routing
    from relibra.replay.routers import RouterSite, find_routers

__all__ = [
    "BatchRoutes", "RouterSite", "RoutingRecorder", "RoutingReplay", "find_routers", "record_routing",
    "replay_routing",
]  # fmt: skip
