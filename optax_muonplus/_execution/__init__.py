"""The numbers of ``_chain.plain``, computed fast.

Read ``apply`` first: it chooses between one device (``local``, then ``device``) and a mesh
(``mesh``). ``lower`` rewrites functions; ``polar`` computes polar factors.
"""
