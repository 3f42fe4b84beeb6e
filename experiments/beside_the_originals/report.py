"""Compare the losses of gnnpar with those of the public code: table and figure."""

import numpy as np
import reports
from beside_the_originals.run import CASES
from records import Files

HEADS = ("case", "seeds", "ours, epoch 30", "theirs", "ours, last", "theirs", "largest difference")


def report(files: Files) -> None:
    """Curves are means over seeds; the difference is the largest of any epoch, of the loss of the public code there."""
    of = reports.by(files.read(), lambda row: row["case"])
    cases = {case: of[case] for case in CASES if case in of}
    plt = reports.pyplot(8)
    figure, axes = plt.subplots(1, len(cases), figsize=(1.9 * len(cases), 2.2), sharey=True, layout="constrained")
    lines = []
    for axis, (case, rows) in zip(axes, cases.items(), strict=True):
        ours, theirs = (np.mean([row[who] for row in rows], axis=0) for who in ("ours", "theirs"))
        ends = [f"{curve[at]:.4f}" for at in (29, -1) for curve in (ours, theirs)]
        largest, means = np.max(np.abs(ours - theirs) / theirs), ours.mean() / theirs.mean()
        lines.append([case, len(rows), *ends, f"{largest:.1e}", f"{means:.3f}"])
        axis.plot(theirs, color="#d95f02", lw=2.5, label="public code")
        axis.plot(ours, color="#000000", lw=1, label="gnnpar")
        axis.set_title(case.replace(" from", "\nfrom"), fontsize=7)
        axis.set(xlabel="epoch", yscale="log")
    heads = (*HEADS, "mean of all epochs, ours / theirs")
    reports.show("losses, 60 epochs, 2 ranks", reports.table(heads, lines))
    axes[0].set_ylabel("training loss")
    axes[0].legend(frameon=False)
    reports.save(figure, files.figure)
