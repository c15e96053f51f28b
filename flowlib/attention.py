"""How a flow's attention turns scores into weights: ``attention = Entmax(alpha=1.5)`` in its class; softmax by default.

Not to be taken for ``flowlib.ops.Softmax``, which is an op over the pages of a row and works on page scores.
"""

from flowlib.core.attention import Entmax, Normaliser, Softmax

__all__ = ["Entmax", "Normaliser", "Softmax"]
