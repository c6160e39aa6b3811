"""From a model to a marked graph, or from a graph made elsewhere to its sites."""
