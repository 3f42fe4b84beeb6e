"""gnnpar's sweeper for Hydra, which looks for plugins in this package: hydra/sweeper=jobs."""

from __future__ import annotations

from hydra._internal.core_plugins import basic_sweeper


class Jobs(basic_sweeper.BasicSweeper):
    """Run the jobs of a grid, or of a study, that have no completed result.

    `max_batch_size`: jobs passed to the launcher at once.
    """

    def sweep(self, arguments: list[str]) -> None:
        from gnnpar.config.sweep import run_missing  # every Hydra application imports this module

        assert self.config is not None and self.hydra_context is not None and self.launcher is not None
        given = [*self._parse_config(), *arguments]
        run_missing(given, self.config, self.hydra_context.config_loader, self.launcher, self.max_batch_size)
