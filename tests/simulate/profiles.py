"""Profiles and plans to test with: small, random, and those of the recorded layer tables."""

import json
from pathlib import Path

import numpy as np

from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.profile.given import read_layer_table
from evenload.profile.profile import Cost, LayerProfile, Profile, Segment
from evenload.setup import Setup

DATA = Path(__file__).parent.parent / "data" / "simulate"
GIVEN = json.loads((DATA / "given_plans.json").read_text())


def given_plan(instance, recorded):
    """(profile, plan) of a recorded plan: `layers` counts the layers of each kind and choice by chunk."""
    choices, table = [], np.zeros((instance["interleave"], instance["pp"]), dtype=int)
    for chunk in range(instance["interleave"]):
        for stage in range(instance["pp"]):
            for of_kind in recorded["layers"].values():
                for choice, counts in of_kind.items():
                    table[chunk, stage] += counts[chunk][stage]
                    choices += [Recompute(choice)] * counts[chunk][stage]
    setup = Setup(**{key: instance[key] for key in ("pp", "interleave", "micro_batches", "schedule")})
    layout = Layout(tuple(map(tuple, table.tolist())))
    return read_layer_table(instance["table"]).profile, Plan(
        setup=setup, layout=layout, policy=Policy.of_choices(choices)
    )


def layer(kind, *, time=1.0, parameters=0.0, kept=1.0, extra=0.0, backward_extra=0.0, buffers=0.0, born=False):
    """A layer that keeps `kept`, or nothing under full recompute, and needs `extra` beside it while it runs.

    Its gradients are half its parameters; where they are `born`, they come to be in the first backward.
    """

    def cost(policy):
        left = 0.0 if policy.full else kept
        again = time if policy.full else 0.0
        return Cost(
            forward_time=time,
            backward_time=2 * time + again,
            recompute_time=again,
            forward=Segment(events=(kept + extra, left - kept - extra)),
            backward=Segment(events=(kept - left + backward_extra, -kept - backward_extra)),
            first_backward=Segment(events=(kept - left + backward_extra, parameters / 2, -kept - backward_extra))
            if born
            else None,
        )

    static = {"parameters": parameters, "gradients": parameters / 2, "optimizer": 2 * parameters, "buffers": buffers}
    return LayerProfile(kind=kind, cost=cost, **static)


def profile_of(*layers, blocks, first=(), last=(), **more):
    return Profile(layers={one.kind: one for one in layers}, blocks=blocks, first=first, last=last, **more)


def even_plan(profile, *, pp, micro_batches, interleave=1, schedule="1f1b", policy=None):
    setup = Setup(pp=pp, interleave=interleave, micro_batches=micro_batches, schedule=schedule)
    layout = Layout.even(len(profile.blocks), pp=pp, interleave=interleave)
    return Plan(setup=setup, layout=layout, policy=policy or Policy())
