"""The strategies: a folder for each family, and the integers that families share.

In a family, the registry reads ``entry``, predictions ``cost``, and the ranks train with ``train``. Only ``train``, a
module or a package, imports torch.
"""
