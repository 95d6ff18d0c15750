"""A pretended CUDA allocator that writes snapshots as PyTorch does, and counts on its own."""

import pickle

USER = "/home/me/train.py"
TORCH = "/usr/lib/python3/site-packages/torch"


def frame(file, line, name):
    return {"filename": file, "line": line, "name": name}


MAIN = [frame(USER, 40, "main"), frame(USER, 60, "<module>")]
FORWARD = [
    frame(f"{TORCH}/nn/functional.py", 2000, "silu"),
    frame(USER, 12, "forward"),
    frame(f"{TORCH}/nn/modules/module.py", 1751, "_call_impl"),
    *MAIN,
]
RECOMPUTE = [
    frame(USER, 12, "forward"),
    frame(f"{TORCH}/nn/modules/module.py", 1751, "_call_impl"),
    frame(f"{TORCH}/utils/checkpoint.py", 1500, "recompute_fn"),
    frame(f"{TORCH}/autograd/graph.py", 829, "_engine_run_backward"),
    *MAIN,
]
BACKWARD = [frame("??", 0, "torch::autograd::Engine::thread_main(...)")]
OPTIMIZER = [frame(f"{TORCH}/optim/adamw.py", 300, "_multi_tensor_adamw"), *MAIN]
BUILD = [
    frame(f"{TORCH}/nn/modules/module.py", 1300, "convert"),
    frame(f"{TORCH}/nn/modules/module.py", 900, "_apply"),
    *MAIN,
]


class Pretended:
    """Blocks of 2 MiB segments, one block a segment: the simplest allocator that a snapshot can describe."""

    SEGMENT = 2**21

    def __init__(self, device=0):
        self.device = device
        self.trace = []
        self.live = {}
        self.cached = []
        self.clock = 1000
        self.held = self.peak = self.reserved = self.most = 0
        self.next = 0x7F0000000000

    def event(self, action, address, size, frames=(), **more):
        self.clock += 7
        key = "device_free" if action == "oom" else "addr"
        self.trace.append(
            {"action": action, key: address, "size": size, "stream": 0, "time_us": self.clock, "frames": list(frames)}
            | more
        )

    def alloc(self, size, frames=(), **more):
        if self.cached:
            address = self.cached.pop()
        else:
            address, self.next = self.next, self.next + self.SEGMENT
            self.reserved += self.SEGMENT
            self.most = max(self.most, self.reserved)
            self.event("segment_alloc", address, self.SEGMENT)
        self.event("alloc", address, size, frames, **more)
        self.live[address] = (size, list(frames))
        self.held += size
        self.peak = max(self.peak, self.held)
        return address

    def free(self, address):
        size, _ = self.live.pop(address)
        self.event("free_requested", address, size)
        self.event("free_completed", address, size)
        self.cached.append(address)
        self.held -= size

    def empty_cache(self):
        for address in self.cached:
            self.event("segment_free", address, self.SEGMENT)
            self.reserved -= self.SEGMENT
        self.cached.clear()

    def segments(self):
        return [
            {
                "device": self.device,
                "address": address,
                "total_size": self.SEGMENT,
                "stream": 0,
                "segment_type": "small",
                "blocks": [
                    {
                        "address": address,
                        "size": -(-self.live[address][0] // 512) * 512 if address in self.live else self.SEGMENT,
                        "requested_size": self.live[address][0] if address in self.live else 0,
                        "state": "active_allocated" if address in self.live else "inactive",
                        "frames": self.live[address][1] if address in self.live else [],
                    }
                ],
            }
            for address in [*self.live, *self.cached]
        ]


def snapshot(*allocators, annotations=()):
    traces = [[] for _ in range(max(one.device for one in allocators) + 1)]
    for one in allocators:
        traces[one.device] = one.trace
    return {
        "segments": [segment for one in allocators for segment in one.segments()],
        "device_traces": traces,
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": list(annotations),
    }


def dump(path, value):
    path.write_bytes(pickle.dumps(value))
    return path


def training(steps=2, leak=0):
    """Two layers, `steps` steps; `leak` bytes of every step's forward stay for ever."""
    gpu = Pretended()
    for size in (40_000, 60_000):
        gpu.alloc(size, BUILD)
    states = []
    for _ in range(steps):
        kept = [gpu.alloc(5000, FORWARD), gpu.alloc(7000, FORWARD)]
        gpu.free(gpu.alloc(900, FORWARD))
        if leak:
            gpu.alloc(leak, FORWARD)
        gradients = []
        for address in reversed(kept):
            gpu.free(gpu.alloc(5000, RECOMPUTE))
            gradients.append(gpu.alloc(40_000, BACKWARD))
            gpu.free(address)
        if not states:
            states = [gpu.alloc(80_000, OPTIMIZER)]
        gpu.free(gpu.alloc(40_000, OPTIMIZER))
        gpu.alloc(8, MAIN)
        for address in gradients:
            gpu.free(address)
    return gpu
