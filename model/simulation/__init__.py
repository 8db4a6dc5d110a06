"""A simulator of the cache tiers under agent traffic."""
