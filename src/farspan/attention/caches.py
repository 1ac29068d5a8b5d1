"""Caches that keep the keys of a layout's windows only."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from farspan.attention.seam import installed_layout


class WindowedLayer(DynamicSlidingWindowLayer):
    """The keys of a window of a layout, under a mask of all keys, of which the seam takes the last.

    Transformers makes one mask for all layers that are not sliding, with the sizes of the first of
    them, and that may be the layer with the shortest window.
    """

    is_sliding = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0


def make_cache(model: PreTrainedModel) -> DynamicCache:
    """A cache for the model in which layers with a window keep the keys of their window only.

    Transformers sizes caches by the config, which knows nothing of a layout. Its own DynamicCache
    is correct too, and larger. Where layers read the keys of others (Gemma 4), all keys stay.
    """
    cache = DynamicCache(config=model.config)
    layout = installed_layout(model)
    shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", None)
    if layout is None or shared:
        return cache
    for index, window in layout.windows.items():
        while index >= len(cache.layers):
            cache.layers.append(DynamicLayer())
        if type(cache.layers[index]) is DynamicLayer:
            cache.layers[index] = WindowedLayer(window)
    return cache


def cache_options(model: PreTrainedModel) -> dict[str, DynamicCache]:
    """The argument of `generate` that keeps its cache small; nothing without windows to use."""
    layout = installed_layout(model)
    return {"past_key_values": make_cache(model)} if layout and layout.windows else {}
