"""FP8 autocast: scopes, sites, scales, and what compiled functions need of them."""
