"""The goods of the shop: what each costs, and when there is a discount. A model cannot know them."""

PRICES = {"pen": 3, "map": 7, "lamp": 24, "rope": 11, "kettle": 19, "compass": 15, "blanket": 32, "candle": 2}
"""Coins for one."""
DISCOUNTS = {"pen": 5, "rope": 3, "candle": 6}
"""From this many on, one of them is free."""


def cost(item: str, count: int) -> int:
    """Return the coins that `count` of an item cost."""
    is_discounted = item in DISCOUNTS and count >= DISCOUNTS[item]
    return PRICES[item] * (count - is_discounted)
