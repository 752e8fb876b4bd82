"""How functions are run on the matrices of a tree: on one device in batches, on a mesh by a plan.

``batching`` is for one device. On a mesh ``schedule``, ``routes`` and ``plan`` decide what travels
where, before anything is traced; ``exchange`` and ``sharded`` then move the shards and do the work.
"""
