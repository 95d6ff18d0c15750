"""Out-of-memory messages in the words of many versions, with made-up numbers."""

TORCH_1_2 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 7.93 GiB total capacity; 6.98 GiB already "
    "allocated; 10.44 MiB free; 256.00 MiB cached)"
)
TORCH_1_13 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 10.76 GiB total capacity; "
    "8.47 GiB already allocated; 62.44 MiB free; 9.83 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management "
    "and PYTORCH_CUDA_ALLOC_CONF"
)
TORCH_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacty of 79.15 "
    "GiB of which 14.25 MiB is free. Including non-PyTorch memory, this process has 79.13 GiB memory in use. Of the "
    "allocated memory 77.00 GiB is allocated by PyTorch, and 600.00 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.  See documentation "
    "for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
FRAGMENTED = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
    "79.15 GiB of which 14.25 MiB is free. Including non-PyTorch memory, this process has 79.13 GiB memory in use. Of "
    "the allocated memory 60.00 GiB is allocated by PyTorch, with 1.00 GiB allocated in private pools (e.g., CUDA "
    "Graphs), and 17.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
    "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
CONTAINER = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 94.97 GiB "
    "of which 16.88 MiB is free. Process 560 has 79.95 GiB memory in use. Process 71 has 15.00 GiB memory in use. Of "
    "the allocated memory 13.24 GiB is allocated by PyTorch, and 14.48 MiB is reserved by PyTorch but unallocated."
)
LIMITED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 79.19 GiB "
    "of which 12.07 GiB is free. Including non-PyTorch memory, this process has 67.11 GiB memory in use. 65.23 GiB "
    "allowed; Of the allocated memory 65.20 GiB is allocated by PyTorch, and 3.54 MiB is reserved by PyTorch but "
    "unallocated."
)
NO_DRIVER_COUNT = (
    "CUDA out of memory. Tried to allocate 3.98 GiB. GPU 0 has a total capacity of 31.84 GiB of which 0 bytes is free. "
    "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated memory 6.74 GiB "
    "is allocated by PyTorch, and 24.00 MiB is reserved by PyTorch but unallocated."
)
NPU = (
    "RuntimeError: NPU out of memory. Tried to allocate 898.00 MiB (NPU 2; 60.97 GiB total capacity; 57.21 GiB already "
    "allocated; 57.21 GiB current active; 848.37 MiB free; 58.31 GiB reserved in total by PyTorch) If reserved memory "
    "is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
XPU = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.50 GiB. GPU 0 has a total capacity of 48.00 GiB of "
    "which 20.00 GiB is free. Of the allocated memory 10.43 GiB is allocated by PyTorch, and 94.57 MiB is reserved by "
    "PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory."
)
HIP = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 GiB. GPU  has a total capacity of 63.98 GiB of "
    "which 30.00 GiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 18.63 MiB is reserved by "
    "PyTorch but unallocated."
)
ASYNCHRONOUS = (
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 44.18 GiB\nRequested               : 500.00 MiB\n"
    "Device limit            : 47.26 GiB\nFree (according to CUDA): 72.38 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 17.93 GB, other allocations: 1.66 MB, max allowed: 18.13 "
    "GB). Tried to allocate 500.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit"
)
HOST = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
DRIVER = "RuntimeError: CUDA error: out of memory"
MINDSPORE = (
    "Out of Memory!!! Request memory size: 33100113920B, Memory Statistic:\nDevice HBM memory size: 32768M\n"
    "MindSpore Used memory size: 30684M\nMindSpore memory base address: 0x124140000000\n"
    "Total Static Memory size: 496M\nTotal Dynamic memory size: 0M"
)
NPU_WORKSPACE = (
    "RuntimeError: NPU out of memory. NPUWorkspaceAllocator tried to allocate 2.51 GiB (NPU 0; 60.97 GiB total "
    "capacity; 1.75 GiB free). If you want to reduce memory usage, set the environment variable TASK_QUEUE_ENABLE=1."
)
ASCEND = "EL0004: [PID: 1] Failed to allocate memory.\n  Possible Cause: Available memory is insufficient."
RT_MALLOC = "[ERROR] RUNTIME(1): rtMalloc failed, device_id=0, size:1073741824"
NCCL = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes"
NUMPY = (
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with shape (100000, 100000) "
    "and data type float64"
)
KERNEL = "[12345.6] Out of memory: Killed process 4242 (python) total-vm:123456kB, anon-rss:99999kB, file-rss:0kB"
SLURM = "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of your processes may have been killed."
PREFIXED = (
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory.\n[rank5]: Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 23.69 GiB of which 1.20 GiB is free."
)
ALL = {
    name: value for name, value in globals().items() if name.isupper() and isinstance(value, str) and name != "__DOC__"
}
