"""Look up prices with tools and add up an order: a taskset of the verifiers v1 API."""

from shop_clerk.taskset import ShopClerkEnv, ShopClerkTaskset

__all__ = ["ShopClerkEnv", "ShopClerkTaskset"]
