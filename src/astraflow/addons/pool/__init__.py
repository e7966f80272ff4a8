"""Pools that size themselves (`cluster.max_services`): as many rollout services as the training needs."""
