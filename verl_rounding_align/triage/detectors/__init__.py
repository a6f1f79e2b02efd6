"""How each cause is seen. A detector takes a :class:`..sample.Sample` (or None, where there are no log-probs) and
:class:`..facts.Facts`, and returns a :class:`..rows.Sign` or None. Its docstring states its statistic, its threshold and
why. The order in which detectors are asked stands in ``..causes``.

    identities.py   identities of log-probs and masks, which one token can break
    shape.py        the shape of u: sharper or flatter log-probs, mass that top-p or top-k cut off, heavy tails
    place.py        where a token stands: at the edge of a response, late in it, in a long one, at a training step
    function.py     one side computes another function: weights, RoPE, context
    settings.py     what settings alone tell
    statistics.py   statistics that several of them share
"""
