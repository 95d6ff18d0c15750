"""The plainest simulator there is, to test the fast one against: tick through the ranks until nothing moves."""

from evenload.plan.schedule import Op, dependency


def naive_times(actions, forward, backward, transfer=0.0):
    """{(rank, action): (start, end)} with times indexed [chunk][stage]."""
    pp, interleave = len(actions), len(forward)
    times, at, free = {}, [0] * pp, [0.0] * pp
    while any(index < len(order) for index, order in zip(at, actions, strict=True)):
        moved = False
        for rank, order in enumerate(actions):
            if at[rank] == len(order):
                continue
            action = order[at[rank]]
            start = free[rank]
            needs = dependency(action, rank, pp=pp, interleave=interleave)
            if needs is not None:
                makers = [(needs.rank, type(action)(op, needs.chunk, action.micro_batch)) for op in needs.ops]
                made = [maker for maker in makers if maker in times]
                if not made:
                    continue
                start = max(start, times[made[0]][1] + (transfer if needs.rank != rank else 0.0))
            table = forward if action.op is Op.FORWARD else backward
            times[rank, action] = (start, start + table[action.chunk][rank])
            free[rank] = times[rank, action][1]
            at[rank] += 1
            moved = True
        assert moved, "deadlock"
    return times


def naive_peak(order, kept, forward_peak, backward_peak, *, first_backward_peak=None, born=None):
    """Highest level of one rank above its static memory, with costs indexed [chunk].

    `born` are gradients that come to be in the first backward of a chunk, and stay.
    """
    level = peak = 0.0
    seen = set()
    for action in order:
        chunk, forward = action.chunk, action.op is Op.FORWARD
        first = born is not None and not forward and chunk not in seen
        peak = max(peak, level + (forward_peak if forward else first_backward_peak if first else backward_peak)[chunk])
        level += kept[chunk] if forward else -kept[chunk]
        if first:
            level += born[chunk]
            seen.add(chunk)
        peak = max(peak, level)
    return peak
