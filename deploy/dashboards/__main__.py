"""``python -m deploy.dashboards``: write every dashboard into the chart."""

from pathlib import Path

from deploy.dashboards import bus, gpus, grafana, overview, policies, reward, rollout, trainer

BOARDS = (overview.BOARD, rollout.BOARD, reward.BOARD, trainer.BOARD, bus.BOARD, policies.BOARD, gpus.BOARD)
FOLDER = Path(__file__).parents[1] / "k8s" / "penstock-monitoring" / "dashboards"


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(grafana.text(board), encoding="utf-8")


if __name__ == "__main__":
    main()
