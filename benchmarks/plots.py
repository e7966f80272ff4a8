"""The style of the pictures that benchmarks draw, which is that of the page and of learning curves."""

__all__ = ["use_style"]


def use_style() -> None:
    """Lets matplotlib draw into files, in the project's style. Imports matplotlib."""
    import matplotlib as mpl
    from matplotlib import style

    mpl.use("Agg")
    style.use("astraflow.addons.plot.astraflow")
