"""vLLM metrics of several engines in one process, with the label ``engine``."""

import threading
from typing import Any


class SharedStatistics:
    """vLLM's Prometheus logger for all ``engines``; each AsyncLLM would replace it."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._config: Any = None
        self._logger: Any = None
        self._lock = threading.Lock()

    def grow(self, engines: int) -> None:
        self._engines, self._logger = engines, self._opened(self._config, engines)

    def factory(self, engine: int) -> type:
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        shared = self

        class EngineStatistics(PrometheusStatLogger):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
                shared._open(vllm_config)

            def record(self, *statistics: Any, **named: Any) -> None:
                shared._logger.record(*statistics, **{**named, "engine_idx": engine})

            def log_engine_initialized(self) -> None:
                pass

        return EngineStatistics

    def _open(self, config: Any) -> None:
        with self._lock:
            if self._logger is None:
                self._config, self._logger = config, self._opened(config, self._engines)

    @staticmethod
    def _opened(config: Any, engines: int) -> Any:
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        logger = PrometheusStatLogger(config, list(range(engines)))
        logger.log_engine_initialized()
        return logger
