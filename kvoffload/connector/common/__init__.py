"""Parts that all folders of the connector use: a request and its blocks, groups, a step's plan, the cache's client."""
