"""vLLM's AsyncLLM as an engine: token ids in and out, on GPUs or on vLLM's CPU build.

vLLM computes in processes of its own. Its client lives on one event loop in a thread, so that the
engine serves callers on any loop, also one after another (`asyncio.run` per batch). Log-probs are
vLLM's processed ones: after temperature and top-p.

A token depends on (seed, input length, place) and on rounding, which the company of a request
changes: a run on vLLM repeats its distribution, not its bits; the torch engine repeats both.
The GPU path is the same class; it has not run on a GPU yet.
"""

import asyncio
import atexit
import hashlib
import os
import tempfile
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import extras
from . import Completion, EngineError, EngineLoad, EngineLost, KvCapacity, Result, Sampling

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine takes the same cores
    # On a CPU: the worker shares a process with vLLM's scheduler. In one of its own a token costs
    # 1.6 times the CPU seconds (experiments/benchmarks/rollout.py, batch 128, one thread).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process that has threads may hang
}
_LOWEST_TEMPERATURE = 0.01  # vLLM silently raises smaller ones
_TIED_HEAD = "lm_head.weight"
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class VllmSettings:
    """What an engine is given.

    max_tokens: longest sequence. kv_tokens: KV capacity; 0: what `memory_fraction` of the device
    leaves. block: tokens of a KV block; multiples of 32 on a CPU. threads: of a worker on a CPU; 0:
    torch's choice. eager: no compilation, which starts sooner and decodes more slowly.
    entropy_vocabulary: completions carry entropies up to this vocabulary size, for which vLLM hands
    over all log-probs of each token; above it, and with a top-p below 1, they carry None.
    """

    max_tokens: int
    kv_tokens: int = 0
    max_sequences: int = 256
    block: int = 32
    dtype: str = "float32"
    memory_fraction: float = 0.9
    tensor_parallel: int = 1
    threads: int = 0
    eager: bool = False
    entropy_vocabulary: int = 2048


class VllmEngine:
    """The `Engine` protocol over a checkpoint folder with safetensors files.

    Raises:
        extras.MissingExtra: vLLM is not installed.
        EngineError: the settings do not fit together, this is not the vLLM that the engine is
            written for, or it does not start.
    """

    def __init__(self, model_path: str | Path, settings: VllmSettings):
        _import_vllm()
        _check_sizes(settings)
        self._settings, self._shapes = settings, _checkpoint_shapes(Path(model_path))
        self._version, self._closed, self._gauge = 0, "", _Gauge()
        self._in_flight, self._one_update = 0, asyncio.Lock()
        self._drained: asyncio.Future[None] | None = None  # of an update: no request in flight
        self._gated: list[tuple[str, asyncio.Future[bool]]] = []  # asked during an update
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._submit(self._start(Path(model_path))).result()
        except BaseException:
            self._stop_loop()
            raise
        atexit.register(self.close)

    # The engine protocol, for callers on any event loop

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: the request cannot fit, however long it waits, or vLLM failed.
            EngineLost: vLLM is dead, or the engine was closed.
        """
        tokens = [int(i) for i in token_ids]
        self._check(request_id, tokens, sampling)
        return await self._run(self._generate(request_id, tokens, sampling))

    def capacity(self) -> KvCapacity:
        return self._capacity

    def load(self) -> EngineLoad:
        """As of vLLM's last step; requests that it has not begun are waiting."""
        asked, seen = self._in_flight, self._gauge
        running = min(seen.running, asked)
        used = round(seen.kv_usage * self._capacity.tokens) if asked else 0
        waiting = asked - running + len(self._gated)
        return EngineLoad(running, waiting, used, seen.preemptions, seen.sampled_tokens)

    async def update_weights(self, version: int, tensors: Mapping) -> None:
        """Take new weights once no request is in flight; every saved prefix is dropped.

        Requests that come meanwhile wait for the new weights: a completion is of one version.
        `tensors` have Hugging Face names; workers read them from a file in shared memory.

        Raises:
            EngineError: a weight is missing, too many, or has another shape: nothing has changed.
            EngineLost: vLLM could not load them; the engine is closed.
        """
        await self._run(self._update(version, _checked(tensors, self._shapes)))

    async def abort(self, request_id: str) -> None:
        """End the request's completions now; they return what they have with finish "abort"."""
        await self._run(self._abort(request_id))

    async def deliver(self, result: Awaitable[Result]) -> Result:
        return await result

    def close(self) -> None:
        """End vLLM's processes. Who still waits for an answer gets `EngineLost`."""
        if not self._loop.is_closed():
            self._closed = self._closed or "the engine was closed; start another one"
            self._submit(self._shut_down()).result()
            self._stop_loop()
            atexit.unregister(self.close)

    # Between the caller's loop and the engine's own

    def _submit(self, coroutine: Coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _run(self, coroutine: Coroutine):
        if self._closed:
            coroutine.close()
            raise EngineLost(self._closed)
        return await asyncio.wrap_future(self._submit(self._answered(coroutine)))

    async def _answered(self, coroutine: Coroutine):
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self._closed:  # by us, not by the caller
                raise EngineLost(self._closed) from None
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # On the engine's own loop

    async def _start(self, model_path: Path) -> None:
        _check_hooks()
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            with _environment(OMP_NUM_THREADS=self._settings.threads):
                self._llm = AsyncLLM.from_engine_args(
                    _engine_arguments(model_path, self._settings), stat_loggers=[self._gauge.bind]
                )
        except Exception as error:
            raise EngineError(
                f"vLLM did not start: {error}; its own messages appear with "
                "VLLM_LOGGING_LEVEL=INFO in the environment"
            ) from error
        cache = self._llm.vllm_config.cache_config
        self._vocabulary = self._llm.model_config.get_vocab_size()
        # One block is vLLM's own, a place for tokens that are not kept.
        self._capacity = KvCapacity((cache.num_gpu_blocks - 1) * cache.block_size, cache.block_size)
        try:
            await self._try_out()
        except Exception:
            self._llm.shutdown()
            raise

    async def _try_out(self) -> None:
        """One token: its log-prob and the step's statistics must arrive."""
        found = await self._generate("start-up", [0], Sampling(max_new_tokens=1, seed=0))
        if len(found.token_ids) != 1 or not np.isfinite(found.logprobs).all():
            raise EngineError(f"vLLM answered a request for one token with {found}")
        if not self._gauge.steps:
            raise EngineError("vLLM decoded a token and sent no statistics of the step")
        self._gauge.sampled_tokens = 0

    async def _shut_down(self) -> None:
        self._llm.shutdown()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        del self._llm  # at the interpreter's end its destructor would fail

    def _check(self, request_id: str, tokens: list[int], sampling: Sampling) -> None:
        longest = len(tokens) + sampling.max_new_tokens
        if not tokens or sampling.max_new_tokens < 1:
            raise EngineError("a request needs at least one input token and max_new_tokens >= 1")
        if longest > self._settings.max_tokens:
            raise EngineError(
                f"request {request_id!r} may reach {longest} tokens, but the engine holds "
                f"{self._settings.max_tokens} per sequence; "
                "lower max_new_tokens or raise model.max_tokens"
            )
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            raise EngineError(
                f"request {request_id!r} has token ids from {min(tokens)} to {max(tokens)}; "
                f"the model knows 0 to {self._vocabulary - 1}"
            )
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise EngineError(
                f"temperature={sampling.temperature}: vLLM samples at 0 (greedy) or at "
                f"{_LOWEST_TEMPERATURE} and above"
            )

    async def _generate(self, request_id: str, tokens, sampling: Sampling) -> Completion:
        from vllm.inputs.engine import tokens_input

        if not await self._is_admitted(request_id):
            return self._completion([], None, sampling, "abort", 0)
        self._in_flight += 1
        try:
            async for output in self._llm.generate(
                tokens_input(tokens), self._parameters(tokens, sampling), request_id
            ):
                found = output
        except Exception as error:
            said = f"vLLM failed on request {request_id!r}: {error!r}"
            if self._closed or self._llm.errored:
                self._closed = self._closed or said
                raise EngineLost(self._closed) from error
            raise EngineError(said) from error
        finally:
            self._in_flight -= 1
            if self._in_flight == 0 and self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
        (sampled,) = found.outputs
        return self._completion(
            sampled.token_ids,
            sampled.logprobs,
            sampling,
            sampled.finish_reason,
            found.num_cached_tokens or 0,
        )

    async def _is_admitted(self, request_id: str) -> bool:
        """Wait while weights are updated; False if the request is aborted meanwhile."""
        while self._drained is not None:
            entry = request_id, self._loop.create_future()
            self._gated.append(entry)
            try:
                if not await entry[1]:
                    return False
            finally:
                self._gated.remove(entry)
        return True

    def _gives_entropies(self, sampling: Sampling) -> bool:
        return (
            sampling.entropies
            and sampling.top_p == 1
            and self._vocabulary <= self._settings.entropy_vocabulary
        )

    def _parameters(self, tokens: list[int], sampling: Sampling):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        seed = sampling.seed
        if seed is not None:  # each turn of a trajectory has a random stream of its own
            text = f"{seed}/{len(tokens)}".encode()
            seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # the stop ids are the caller's
            logprobs=-1 if self._gives_entropies(sampling) and sampling.temperature else 0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, token_ids, flat, sampling: Sampling, finish, cached) -> Completion:
        """From vLLM's flat list: per token the sampled one's log-prob, then all if asked for."""
        if finish not in ("stop", "length", "abort"):
            raise EngineError(f"vLLM ended a request with {finish!r}")
        count = len(token_ids)
        is_greedy = sampling.temperature == 0
        logprobs_TV = np.zeros((count, 1), np.float32)
        if count and not is_greedy:
            logprobs_TV = np.asarray(flat.logprobs, np.float32).reshape(count, -1)
        entropies_T = None
        if self._gives_entropies(sampling):
            all_TV = logprobs_TV[:, 1:]
            entropies_T = -(np.exp(all_TV) * np.maximum(all_TV, -1e9)).sum(-1)
        return Completion(
            token_ids=np.asarray(token_ids, np.int32),
            logprobs=logprobs_TV[:, 0],
            entropies=entropies_T,
            finish=finish,
            weight_version=self._version,
            cached_tokens=cached,
        )

    async def _abort(self, request_id: str) -> None:
        for waiting, gate in self._gated:
            if waiting == request_id and not gate.done():
                gate.set_result(False)
        await self._llm.abort(request_id)

    async def _update(self, version: int, tensors: dict) -> None:
        async with self._one_update:
            self._drained = self._loop.create_future()
            try:
                if self._in_flight:
                    await self._drained
                await self._load_weights(tensors)
                self._version = version
            finally:
                self._drained = None
                for _, gate in self._gated:
                    if not gate.done():
                        gate.set_result(True)

    async def _load_weights(self, tensors: dict) -> None:
        from safetensors.torch import save_file

        shared = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None
        try:
            with tempfile.TemporaryDirectory(dir=shared) as folder:
                path = f"{folder}/weights.safetensors"
                save_file(tensors, path)
                await self._llm.collective_rpc("take_weights", args=(path,))
            if not await self._llm.reset_prefix_cache():
                raise RuntimeError("the prefix cache is in use")
        except Exception as error:
            self._closed = f"vLLM could not take the new weights: {error}; the engine is closed"
            self._llm.shutdown()
            raise EngineLost(self._closed) from error


class WeightTaking:
    """What this engine adds to vLLM's worker."""

    def take_weights(self, path: str) -> None:
        """Load a safetensors file in place of the present weights."""
        from safetensors.torch import load_file

        self.reload_weights(weights_iterator=iter(load_file(path).items()))
        # vLLM's CPU build computes with a packed copy of each matrix. Reloading packs every layer
        # again but a tied head, whose weight arrived through the embedding.
        for layer in self.get_model().modules():
            if type(layer).__name__ == "ParallelLMHead":
                layer.quant_method.process_weights_after_loading(layer)


class _Gauge:
    """A statistics logger of vLLM that keeps the last step's state and counts what has happened."""

    def __init__(self):
        self.steps = self.running = self.preemptions = self.sampled_tokens = 0
        self.kv_usage = 0.0

    def bind(self, vllm_config, engine_index: int = 0) -> "_Gauge":
        return self

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0) -> None:
        self.steps += 1
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.sampled_tokens += iteration_stats.num_generation_tokens

    def log(self) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        pass


def _import_vllm() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        extras.load("vllm")
    except extras.MissingExtra:
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM does not import: {error}; beside a CPU build of torch it needs "
            "`pip uninstall torchvision torchaudio torchcodec`"
        ) from error


def _check_sizes(settings: VllmSettings) -> None:
    held = settings.kv_tokens // settings.block * settings.block
    if settings.kv_tokens and held < settings.max_tokens:
        raise EngineError(
            f"kv_tokens={settings.kv_tokens} is {held} tokens in whole blocks of {settings.block}, "
            f"less than one sequence of max_tokens={settings.max_tokens}; raise engine.kv_tokens "
            "or lower model.max_tokens"
        )


def _check_hooks() -> None:
    """Everything used here that vLLM does not promise to keep.

    Raises:
        EngineError: with what is missing.
    """
    import vllm

    advice = (
        f"this engine is written for vLLM 0.32.0, and this is {vllm.__version__}; install the "
        "version in constraints.txt"
    )
    try:
        from vllm.inputs.engine import tokens_input  # noqa: F401
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase
        from vllm.v1.metrics.stats import IterationStats, SchedulerStats
        from vllm.v1.worker.gpu_worker import Worker
    except ImportError as error:
        raise EngineError(f"{error}; {advice}") from error
    missing = []
    for owner, names in (
        (AsyncLLM, "abort collective_rpc errored reset_prefix_cache shutdown"),
        (SchedulerStats(), "num_running_reqs kv_cache_usage"),
        (IterationStats(), "num_preempted_reqs num_generation_tokens"),
        (SamplingParams(), "flat_logprobs stop_token_ids ignore_eos output_kind"),
        (Worker, "reload_weights get_model"),
    ):
        kind = owner if isinstance(owner, type) else type(owner)
        missing += [f"{kind.__name__}.{x}" for x in names.split() if not hasattr(owner, x)]
    asked = set(StatLoggerBase.__abstractmethods__) - set(dir(_Gauge))
    if missing or asked:
        raise EngineError(
            f"vLLM lacks {missing}, or wants {sorted(asked)} of a statistics logger; {advice}"
        )


def _engine_arguments(model_path: Path, settings: VllmSettings):
    """vLLM's own names for the settings."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = {
        "model": str(model_path),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": settings.dtype,
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.max_sequences,
        "block_size": settings.block,
        "gpu_memory_utilization": settings.memory_fraction,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "worker_extension_cls": f"{__name__}.{WeightTaking.__name__}",
        "use_tqdm_on_load": False,
        "enable_log_requests": False,
        "disable_log_stats": True,  # vLLM's own loggers; ours is passed to the engine
    }
    if settings.kv_tokens:
        arguments["num_gpu_blocks_override"] = settings.kv_tokens // settings.block + 1
    if not torch.cuda.is_available():
        # A prompt in pieces would wind a request's random stream back, which CPU streams cannot.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(settings.max_tokens, 8192)
        if settings.kv_tokens:  # else vLLM first asks for its fraction of the memory
            arguments["kv_cache_memory_bytes"] = 1 << 28
    return AsyncEngineArgs(**arguments)


@contextmanager
def _environment(**values: int) -> Iterator[None]:
    """Environment variables for the processes that start meanwhile; 0 leaves one as it is."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _checkpoint_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors."""
    from safetensors import safe_open

    shapes = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    if not shapes:
        raise EngineError(f"no *.safetensors at {model_path}; save the checkpoint in that format")
    return shapes


def _checked(tensors: Mapping, shapes: dict[str, tuple[int, ...]]) -> dict:
    """Copies on the CPU, ready for a file: what the checkpoint holds, no less and no more.

    A tied head is the embedding: the checkpoint holds it once, a state dict names it twice.
    """
    tensors = {k: v for k, v in tensors.items() if k in shapes or k != _TIED_HEAD}
    missing, unexpected = sorted(shapes.keys() - tensors), sorted(tensors.keys() - shapes)
    other = [k for k, v in tensors.items() if k in shapes and tuple(v.shape) != shapes[k]]
    if missing or unexpected or other:
        raise EngineError(
            f"the weights do not fit the checkpoint that the engine started with: missing "
            f"{missing[:3]}, unexpected {unexpected[:3]}, of another shape {other[:3]}"
        )
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
