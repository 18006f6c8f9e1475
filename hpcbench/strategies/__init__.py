"""The strategies: a folder for each family, and the integers that families share.

In a family, the registry reads ``entry``, predictions ``cost``, and the ranks train with ``train``. Only ``train``, and
the modules that it alone uses, import torch.
"""
