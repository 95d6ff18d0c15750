"""Planning problems to test with: the recorded instances and random ones, and an exhaustive search to compare with."""

import itertools
import json
import random
from pathlib import Path

import numpy as np

from evenload.plan.policy import LayerPolicy, Recompute
from evenload.planner.problem import Problem
from evenload.profile.given import read_layer_table
from evenload.profile.profile import Cost, LayerProfile, Profile, Segment
from evenload.setup import Setup

INSTANCES = json.loads((Path(__file__).parent.parent / "data" / "planner" / "instances.json").read_text())
BY_ID = {instance["id"]: instance for instance in INSTANCES}
ORDER = (Recompute.FULL, Recompute.BOTH, Recompute.SELECT, Recompute.COMM, Recompute.NONE)
SCHEDULES = ("interleaved_1f1b", "interleaved_1f1b_less_memory", "mindspore_interleaved")


def of_instance(name):
    """(profile, setup, limit) of a recorded instance."""
    instance = BY_ID[name]
    setup = Setup(**{key: instance[key] for key in ("pp", "interleave", "micro_batches", "schedule")})
    return read_layer_table(instance).profile, setup, float(instance["memory"])


def random_setup(rng, *, stages=(2, 4), interleaves=(1, 1, 2), micro_batches=(1, 8)):
    interleave = rng.choice(interleaves)
    return Setup(
        pp=rng.randint(*stages),
        interleave=interleave,
        micro_batches=rng.randint(*micro_batches),
        schedule="1f1b" if interleave == 1 else rng.choice(SCHEDULES),
    )


def random_table(seed, *, layers=(4, 10), kinds=(1, 1, 2), **sizes):
    """(profile, setup, limit) of a random layer table in whole numbers."""
    rng = random.Random(seed)
    setup = random_setup(rng, **sizes)
    count = max(rng.randint(*layers), setup.chunks)

    def body(name, number):
        kept = rng.randint(20, 100)
        entry = {
            "name": name,
            "type": "BODY",
            "time": rng.randint(5, 20),
            "nb_layer": number,
            "memory_parameter": rng.randint(10, 100),
            "memory_activation": kept,
        }
        shares = {
            "memory_recompute": (0.05, 0.3),
            "memory_select_rec": (0.6, 0.95),
            "memory_select_comm": (0.5, 0.95),
            "memory_both_comm_select": (0.3, 0.6),
        }
        for key, share in shares.items():
            if rng.random() < 0.6:
                entry[key] = max(1, round(kept * rng.uniform(*share)))
        return entry

    if rng.choice(kinds) == 2:
        first = rng.randint(1, count - 1)
        bodies = [body("A", first), body("B", count - first)]
    else:
        bodies = [body("A", count)]
    ends = [
        {"name": kind, "type": kind, "time": rng.randint(0, 20), "memory_parameter": rng.randint(0, 200)}
        for kind in ("HEAD", "TAIL")
    ]
    static = sum(entry["memory_parameter"] * entry["nb_layer"] for entry in bodies) / setup.pp
    kept = max(entry["memory_activation"] for entry in bodies) * count / setup.pp
    limit = round(100 + static + kept * min(setup.micro_batches, setup.pp) * rng.uniform(0.2, 1.1))
    return read_layer_table({"layers_description": [ends[0], *bodies, ends[1]]}).profile, setup, limit


def random_model(seed, *, layers=(4, 9), **sizes):
    """(profile, setup, limit) of a random model with working memory, buffers, an optimizer step and two kinds mixed.

    Gradients of every other one come to be in the first backward of a step.
    """
    rng = random.Random(seed)
    setup = random_setup(rng, **sizes)
    count = max(rng.randint(*layers), setup.chunks)
    kinds = {name: _random_layer(rng, name, births=bool(seed % 2)) for name in ("a", "b", "embedding", "head")}
    profile = Profile(
        layers=kinds,
        blocks=tuple(rng.choice("aab") for _ in range(count)),
        first=("embedding",) * rng.randint(0, 1),
        last=("head",) * rng.randint(0, 1),
        constant=float(rng.randint(0, 50)),
        outside=float(rng.randint(0, 50)),
        transfer_time=rng.choice([0.0, 0.5]),
        buffers=lambda stage, held: 3.0 * held + (10.0 if stage else 0.0),
        optimizer_transient=lambda parameters: parameters / 2,
    )
    return profile, setup, round(200 + 70 * count / setup.pp * rng.uniform(1.0, min(setup.micro_batches, setup.pp) + 1))


def _random_layer(rng, kind, *, births):
    time, kept, work = rng.randint(1, 10), rng.randint(20, 60), rng.randint(0, 30)
    left = {
        Recompute.NONE: kept,
        Recompute.SELECT: round(0.8 * kept),
        Recompute.COMM: round(0.7 * kept),
        Recompute.BOTH: round(0.5 * kept),
        Recompute.FULL: round(0.1 * kept),
    }
    again = {choice: time * extra for choice, extra in zip(reversed(ORDER), (0, 0.1, 0.2, 0.3, 1.0), strict=True)}

    def cost(policy):
        choice = policy.choice
        stays = left[choice]
        first = (kept - stays + work, static, 3, -kept - work - 3)
        return Cost(
            forward_time=time,
            backward_time=2 * time + again[choice],
            recompute_time=again[choice],
            forward=Segment(events=(kept + work, stays - kept - work)),
            backward=Segment(events=(kept - stays + work, -kept - work)),
            first_backward=Segment(events=first) if births else None,
        )

    static = rng.randint(5, 20)
    return LayerProfile(kind=kind, parameters=static, gradients=static, optimizer=2 * static, buffers=2.0, cost=cost)


def layouts(problem):
    """Every layout that the problem allows."""
    least = problem.least

    def rest(chunk, left):
        if chunk == problem.chunks - 1:
            if left >= least[chunk]:
                yield (left,)
            return
        for count in range(least[chunk], left - sum(least[chunk + 1 :]) + 1):
            for tail in rest(chunk + 1, left - count):
                yield (count, *tail)

    return rest(0, len(problem.profile.blocks))


def optimum(problem, *, expressible=True):
    """Lowest step time over all layouts and choices that fit, by trying all of them; infinite where none fits.

    Args:
        problem: what is planned.
        expressible: only choices that "the first n layers of a chunk" can say; else any choice on any layer.
    """
    ranks, best = {}, np.inf
    for counts in layouts(problem):
        bounds = [0, *itertools.accumulate(counts)]
        options = []
        for stage in range(problem.pp):
            key = (
                stage,
                tuple(bounds[chunk : chunk + 2] for chunk in range(stage, problem.chunks, problem.pp)).__repr__(),
            )
            if key not in ranks:
                ranks[key] = _rank_options(problem, stage, bounds, expressible)
            options.append(ranks[key])
        if all(options):
            times = np.array(list(itertools.product(*options)))  # [K, stage, forward and backward, chunk]
            steps = problem.graph.step_times(
                times[:, :, 0].transpose(0, 2, 1), times[:, :, 1].transpose(0, 2, 1), problem.profile.transfer_time
            )
            best = min(best, float(steps.min()))
    return best


def _rank_options(problem, stage, bounds, expressible):
    """Pareto-minimal (forward times, backward times) of a rank that fit."""
    profile = problem.profile
    chunks = range(stage, problem.chunks, problem.pp)
    per_chunk = [_chunk_options(problem, chunk, bounds[chunk], bounds[chunk + 1], expressible) for chunk in chunks]
    kinds = [kind for chunk in chunks for kind in _kinds(problem, chunk, bounds[chunk], bounds[chunk + 1])]
    layers = [profile.kind(kind) for kind in kinds]
    base = profile.constant + sum(layer.static + layer.buffers for layer in layers)
    if profile.buffers is not None:
        base += profile.buffers(stage, sum(bounds[chunk + 1] - bounds[chunk] for chunk in chunks))
    step = 0.0
    if profile.optimizer_transient is not None:
        step = profile.optimizer_transient(sum(layer.parameters for layer in layers))
    found = []
    for combination in itertools.product(*per_chunk):
        _, _, kept, forward_peak, backward_peak, first, born = np.array(combination).T
        moments = problem.graph.in_flight_with_births[stage]
        level = moments.level(kept, forward_peak, backward_peak, first_backward_peak=first, born=born).max()
        if base - born.sum() + max(level, step + born.sum()) + profile.outside <= problem.limit:
            found.append(([one[0] for one in combination], [one[1] for one in combination]))
    found.sort(key=lambda times: (sum(times[1]), times[1]))
    kept_times = []
    for times in found:
        if not any(all(a <= b for a, b in zip(other[1], times[1], strict=True)) for other in kept_times):
            kept_times.append(times)
    return kept_times


def _kinds(problem, chunk, start, end):
    first = problem.profile.first if chunk == 0 else ()
    last = problem.profile.last if chunk == problem.chunks - 1 else ()
    return [*first, *problem.profile.blocks[start:end], *last]


def _chunk_options(problem, chunk, start, end, expressible):
    """{(forward, backward, kept, peaks of forward, backward and first backward, born)} under all rows of choices."""
    profile = problem.profile
    first = len(profile.first) if chunk == 0 else 0
    kinds = _kinds(problem, chunk, start, end)
    found = set()
    for row in _rows(end - start, expressible):
        policies = [LayerPolicy()] * first + [LayerPolicy.of(choice) for choice in row]
        policies += [LayerPolicy()] * (len(kinds) - len(policies))
        if all(
            choice in profile.kind(kind).choices for choice, kind in zip(row, profile.blocks[start:end], strict=True)
        ):
            costs = [profile.kind(kind).cost(policy) for kind, policy in zip(kinds, policies, strict=True)]
            forward, backward, *memory = _sum(costs)
            found.add((forward + profile.chunk_forward, backward + profile.chunk_backward, *memory))
    return sorted(found)


def _rows(layers, expressible):
    if not expressible:
        yield from itertools.product(ORDER, repeat=layers)
        return
    for row in itertools.combinations_with_replacement(ORDER, layers):
        if not (Recompute.SELECT in row and Recompute.COMM in row):
            yield row


def _sum(costs):
    forward_peak = backward_peak = level = 0.0
    for cost in costs:
        forward_peak = max(forward_peak, level + cost.forward.peak)
        level += cost.kept
    kept, level, first_peak, born = level, 0.0, 0.0, 0.0
    for cost in reversed(costs):
        backward_peak = max(backward_peak, level + cost.backward.peak)
        first_peak = max(first_peak, level + born + cost.first.peak)
        level -= cost.kept
        born += cost.born
    return (
        sum(cost.forward_time for cost in costs),
        sum(cost.backward_time for cost in costs),
        kept,
        forward_peak,
        backward_peak,
        first_peak,
        born,
    )


def problem_of(case, **more):
    profile, setup, limit = case
    return Problem(profile=profile, setup=setup, limit=limit, **more)
