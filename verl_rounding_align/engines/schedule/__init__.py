"""What torch stores when a model runs, and from it the site map: where an engine's decoder layer rounds, beside the trainer's.

graph.py      the form of what is read: values, and the buffers that hold them
inductor.py   what a compiled graph stores: Inductor's schedule after fusion
eager.py      what an eager run stores: every operator's result
follow.py     one decoder layer in a graph, and its rounding points followed from reader to value
site_map.py   the map of one engine beside the trainer, compared with a preset

Nothing here imports an engine. ``engines/vllm/sites.py`` runs vLLM's model under these hooks.
"""
