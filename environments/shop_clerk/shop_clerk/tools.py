"""The tools of the shop, an MCP server. verifiers starts it as `python -m shop_clerk.tools`."""

import verifiers.v1 as vf

from shop_clerk.goods import DISCOUNTS, PRICES


class ShopToolset(vf.Toolset[vf.SharedToolsetConfig]):
    """Answers what goods cost."""

    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str) -> str:
        """Returns the price of one item in coins.

        Args:
            item: name of the goods, in the singular.
        """
        if item not in PRICES:
            return f"unknown item {item!r}; the shop has {', '.join(PRICES)}"
        return str(PRICES[item])

    @vf.tool
    def discount(self, item: str) -> str:
        """Returns from how many on there is a discount on an item.

        Args:
            item: name of the goods, in the singular.
        """
        if item not in DISCOUNTS:
            return f"no discount on {item}"
        return f"from {DISCOUNTS[item]} on, one {item} is free"


if __name__ == "__main__":
    ShopToolset.run()
