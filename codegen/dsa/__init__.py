"""3D deformable sliding attention: a video grid and a window in, operators and their kernels out.

In: q [B, heads, N, D], k and v [B, key heads, N, D] with N = T * H * W tokens in raster order, and per token and head
(or group of heads) one offset vector in token units.  Out: the attention of each query to its kt x kh x kw window,
sampled by trilinear interpolation, and its log-sum-exp.  `reference.py` is the definition, in plain torch.
"""
