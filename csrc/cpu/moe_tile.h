// Products of expert weights with a block of rows that stays in the caches.
//
// The rows (tokens) are the *lanes* of vectors: a block of rows X [n, depth] is kept transposed, in panels of 2 L lanes
// (L the vector's size; the last panel has L lanes if that is enough, zeros where no row is):
//
//   panel p: [depth][width(p)], at offset p * 2 L * depth
//
// A tile of weight rows times a panel gives another panel, (W X^T)^T as the next product needs it: up-projection,
// activation and down-projection chain with no repacking between them. Weights whose rows are contiguous are read where
// they lie, element by element as broadcasts, so that a weight costs one read however few rows an expert has; other
// layouts and dtypes are packed. Of weights whose columns are contiguous (a transpose) kColumns are packed at a time, as
// runs that are long enough for the processor to read ahead.
//
// An element of a product is one chain of fmas over depth in blocks of kLaneDepth (kColumnDepth): its bits depend neither
// on the rows beside it nor on how rows are cut into blocks, panels and tasks.
#pragma once
#include <vector>

#include "gemm_blocked.h"

namespace pyfast {

constexpr int64_t kLaneDepth = 512, kColumnDepth = 128;

// Weight rows that are packed at a time, if they must be.
template <class C>
constexpr int64_t kGroup = 4 * Tile<C>::rows;
// The same of weights whose columns are contiguous: kColumns x kColumnDepth packed values are a quarter of L2.
template <class C>
constexpr int64_t kColumns = 2112 / int64_t(sizeof(C)) / kGroup<C> * kGroup<C>;

// How many weight rows are best multiplied at a time.
template <class C>
int64_t group_rows(const Matrix& w) {
  return w.row_stride == 1 && w.col_stride != 1 ? kColumns<C> : kGroup<C>;
}

// Which rows of a panel layout are where.
template <class C>
struct LaneBlock {
  static constexpr int64_t L = Vec<C>::size, kWide = 2 * L;
  int64_t rows;
  int64_t panels() const { return (rows + kWide - 1) / kWide; }
  int64_t count(int64_t panel) const { return std::min(kWide, rows - panel * kWide); }    // rows in it
  int64_t width(int64_t panel) const { return count(panel) > L ? kWide : L; }             // lanes of it
  int64_t lanes() const { return round_up(rows, L); }                                     // of all panels
};

// ---- the kernel -----------------------------------------------------------------------------------------------------

// Memory to ask for while computing: from `next` on, three cache lines every kAheadSteps steps of depth.
struct Ahead {
  const char* next;
  int64_t step;  // 192 bytes; 0: nothing new
};
constexpr int64_t kAheadSteps = 8;

// c [ROWS, NV L] = (accumulate ? c : 0) + a b. b [depth][NV L]. a: element (r, k) at a[r * a_stride + k], or, PACKED, in
// a panel of gemm_kernel.h, a[k * MR + r].
template <class C, int ROWS, int NV, bool PACKED>
void lane_kernel(int64_t depth, const C* __restrict a, int64_t a_stride, const C* __restrict b, C* __restrict c,
                 int64_t c_stride, bool accumulate, Ahead ahead) {
  constexpr int MR = Tile<C>::rows, L = Vec<C>::size;
#pragma GCC unroll 1
  for (int r = 0; r < ROWS; ++r) {
    __builtin_prefetch(c + r * c_stride, 1);
    if (NV * sizeof(vec_t<C>) > 64) __builtin_prefetch(c + r * c_stride + L, 1);
  }
  vec_t<C> sum[ROWS][NV];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[r][v] = zero<C>();
  // Three rows a pointer: base, + stride, + 2 stride are all addresses that one instruction can form.
  constexpr int kPointers = (ROWS + 2) / 3;
  const C* base[kPointers];
#pragma GCC unroll 4
  for (int g = 0; g < kPointers; ++g) base[g] = PACKED ? a : a + 3 * g * a_stride;
  for (int64_t k = 0; k < depth;) {
    if constexpr (PACKED) {
      __builtin_prefetch(ahead.next, 0, 2);
      __builtin_prefetch(ahead.next + 64, 0, 2);
      __builtin_prefetch(ahead.next + 128, 0, 2);
      ahead.next += ahead.step;
    }
    for (const int64_t end = std::min(depth, k + kAheadSteps); k < end; ++k, b += NV * L) {
      vec_t<C> bv[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) bv[v] = load(b + v * L);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const vec_t<C> av = broadcast<C>(PACKED ? a[r] : base[r / 3][(r % 3) * a_stride]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] += av * bv[v];
      }
      if constexpr (PACKED) {
        a += MR;
      } else {
#pragma GCC unroll 4
        for (int g = 0; g < kPointers; ++g) ++base[g];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r, c += c_stride)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(c + v * L, accumulate ? load(c + v * L) + sum[r][v] : sum[r][v]);
}

// A tile of weight rows as lane_kernel reads it.
template <class C>
struct TileA {
  const C* data;
  int64_t stride;
  bool packed;
};

// Whether there is a kernel of exactly that many rows, which reads and writes no row beyond them.
template <class C>
constexpr bool is_whole_tile(int64_t rows) {
  constexpr int MR = Tile<C>::rows;
  return rows == MR || rows == MR * 2 / 3 || rows == MR / 3;
}

template <class C, int NV, bool PACKED>
PF_INLINE void lane_kernel_for(int64_t rows, int64_t depth, const C* a, int64_t a_stride, const C* b, C* c,
                               int64_t c_stride, bool accumulate, Ahead ahead) {
  constexpr int MR = Tile<C>::rows, two = MR * 2 / 3, one = MR / 3;
  if (rows > two)
    lane_kernel<C, MR, NV, PACKED>(depth, a, a_stride, b, c, c_stride, accumulate, ahead);
  else if (rows > one)
    lane_kernel<C, two, NV, PACKED>(depth, a, a_stride, b, c, c_stride, accumulate, ahead);
  else
    lane_kernel<C, one, NV, PACKED>(depth, a, a_stride, b, c, c_stride, accumulate, ahead);
}

// `rows` <= MR rows (computed in thirds of MR) times a panel of `width` lanes.
template <class C>
PF_INLINE void multiply_tile(int64_t rows, int64_t depth, const TileA<C>& a, int64_t width, const C* b, C* c,
                             int64_t c_stride, bool accumulate, Ahead ahead) {
  if (width == LaneBlock<C>::kWide) {
    if (a.packed)
      lane_kernel_for<C, 2, true>(rows, depth, a.data, a.stride, b, c, c_stride, accumulate, ahead);
    else
      lane_kernel_for<C, 2, false>(rows, depth, a.data, a.stride, b, c, c_stride, accumulate, ahead);
  } else {
    if (a.packed)
      lane_kernel_for<C, 1, true>(rows, depth, a.data, a.stride, b, c, c_stride, accumulate, ahead);
    else
      lane_kernel_for<C, 1, false>(rows, depth, a.data, a.stride, b, c, c_stride, accumulate, ahead);
  }
}

// ---- weights --------------------------------------------------------------------------------------------------------

namespace detail {

// out[i] = in[i], widened.
template <class C, class T>
PF_INLINE void widen_run(const T* in, int64_t count, C* out) {
  int64_t i = 0;
  for (; i + Vec<C>::size <= count; i += Vec<C>::size) store(out + i, load(in + i));
  for (; i < count; ++i) out[i] = widen(in[i]);
}

// Columns [0, lanes) of `depth` rows of memory, row(k) -> const T*, into packed tiles [tile][depth][MR], `tile_stride`
// apart. lanes <= kColumns.
template <class C, class T, class Row>
void pack_columns(Row&& row, int64_t lanes, int64_t depth, C* out, int64_t tile_stride) {
  constexpr int64_t MR = Tile<C>::rows, kAhead = 4;
  alignas(64) C run[kColumns<C>];
  const int64_t tiles = (lanes + MR - 1) / MR, whole = std::is_same_v<T, C> ? lanes / MR : 0;
  std::fill(run + lanes, run + tiles * MR, C(0));
  for (int64_t k = 0; k < depth; ++k, out += MR) {
    const T* in = row(k);
    if (k + kAhead < depth) {
      const T* ahead = row(k + kAhead);
      for (int64_t i = 0; i < lanes; i += 64 / sizeof(T)) __builtin_prefetch(ahead + i);
    }
    for (int64_t t = 0; t < whole; ++t) std::memcpy(out + t * tile_stride, in + t * MR, MR * sizeof(C));
    widen_run(in + whole * MR, lanes - whole * MR, run + whole * MR);
    for (int64_t t = whole; t < tiles; ++t) std::memcpy(out + t * tile_stride, run + t * MR, MR * sizeof(C));
  }
}

}  // namespace detail

inline int64_t item_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// Rows [first, first + rows) of w, depth [p, p + depth), as tiles[0 ...]; `scratch` holds kGroup x kLaneDepth elements.
template <class C>
void weight_tiles(const Matrix& w, int64_t first, int64_t rows, int64_t p, int64_t depth, C* scratch, TileA<C>* tiles) {
  constexpr int64_t MR = Tile<C>::rows;
  with_matrix<C>(w, first, p, [&](auto* source) {
    using T = std::decay_t<decltype(*source)>;
    for (int64_t t = 0, i = 0; i < rows; ++t, i += MR, scratch += MR * depth) {
      const int64_t count = std::min(MR, rows - i);
      if (w.col_stride == 1) {
        if constexpr (std::is_same_v<T, C>) {
          if (is_whole_tile<C>(count)) {
            tiles[t] = {source + i * w.row_stride, w.row_stride, false};
            continue;
          }
        }
        for (int64_t r = 0; r < MR; ++r) {
          if (r < count)
            detail::widen_run(source + (i + r) * w.row_stride, depth, scratch + r * depth);
          else
            std::fill_n(scratch + r * depth, depth, C(0));
        }
        tiles[t] = {scratch, depth, false};
      } else {
        pack_a<C>(source + i * w.row_stride, w.row_stride, w.col_stride, count, depth, scratch);
        tiles[t] = {scratch, MR, true};
      }
    }
  });
}

// Where products of a block's panels go: [panel][group][width], from row `first` of the group on.
template <class C>
struct LaneSums {
  C* data;
  int64_t group, first;
  C* at(int64_t start, int64_t width, int64_t row) const { return data + start * group + (first + row) * width; }
};

namespace detail {

// multiply_lanes for weights whose rows, or nothing, are contiguous.
template <class C>
void multiply_rows_of(const Matrix& w, int64_t first, int64_t rows, int64_t depth, const LaneBlock<C>& block, const C* b,
                      const LaneSums<C>& sums) {
  static thread_local Scratch memory;
  constexpr int64_t MR = Tile<C>::rows;
  C* scratch = memory.get<C>(kGroup<C> * kLaneDepth);
  TileA<C> tiles[4];
  for (int64_t p = 0; p < depth; p += kLaneDepth) {
    const int64_t kc = std::min(kLaneDepth, depth - p);
    weight_tiles<C>(w, first, rows, p, kc, scratch, tiles);
    for (int64_t t = 0; t * MR < rows; ++t)
      for (int64_t panel = 0; panel < block.panels(); ++panel) {
        const int64_t width = block.width(panel), start = panel * block.kWide;
        multiply_tile<C>(std::min(MR, rows - t * MR), kc, tiles[t], width, b + start * depth + p * width,
                         sums.at(start, width, t * MR), width, p > 0, {reinterpret_cast<const char*>(b), 0});
      }
  }
}

// multiply_lanes for weights whose columns are contiguous: the next block of them is asked for while one is computed.
template <class C>
void multiply_columns_of(const Matrix& w, int64_t w_rows, int64_t first, int64_t rows, int64_t depth,
                         const LaneBlock<C>& block, const C* b, const LaneSums<C>& sums) {
  static thread_local Scratch memory;
  constexpr int64_t MR = Tile<C>::rows, kTile = kColumnDepth * MR + 64 / sizeof(C);  // no power of two apart
  C* tiles = memory.get<C>(kColumns<C> / MR * kTile);
  const int64_t item = item_size(w.dtype);
  for (int64_t p = 0; p < depth; p += kColumnDepth) {
    const int64_t kc = std::min(kColumnDepth, depth - p);
    with_matrix<C>(w, first, p, [&](auto* source) {
      using T = std::decay_t<decltype(*source)>;
      pack_columns<C, T>([&](int64_t k) { return source + k * w.col_stride; }, rows, kc, tiles, kTile);
    });
    const bool last = p + kc == depth;
    const int64_t next_row = last ? first + rows : first, next_depth = last ? 0 : p + kc;
    const int64_t next_count = next_row < w_rows ? std::min(kColumnDepth, depth - next_depth) : 0;
    const char* next = static_cast<const char*>(w.data) + (next_row + next_depth * w.col_stride) * item;
    int64_t call = 0;
    for (int64_t panel = 0; panel < block.panels(); ++panel) {
      const int64_t width = block.width(panel), start = panel * block.kWide;
      for (int64_t t = 0; t * MR < rows; ++t, ++call) {
        const Ahead ahead = call < next_count ? Ahead{next + call * w.col_stride * item, 192}
                                              : Ahead{reinterpret_cast<const char*>(tiles), 0};
        multiply_tile<C>(std::min(MR, rows - t * MR), kc, {tiles + t * kTile, MR, true}, width,
                         b + start * depth + p * width, sums.at(start, width, t * MR), width, p > 0, ahead);
      }
    }
  }
}

}  // namespace detail

// sums [panel][group][width] = rows [first, first + rows) of w [w_rows, depth], rows <= group, times the panels b. `group`
// is a multiple of the tile's rows.
template <class C>
void multiply_lanes(const Matrix& w, int64_t w_rows, int64_t first, int64_t rows, int64_t depth,
                    const LaneBlock<C>& block, const C* b, C* sums, int64_t group) {
  if (depth == 0) std::fill_n(sums, block.lanes() * group, C(0));
  const int64_t step = group_rows<C>(w);
  for (int64_t i = 0; i < rows; i += step) {
    const int64_t count = std::min(step, rows - i);
    const LaneSums<C> target{sums, group, i};
    if (step == kGroup<C>)
      detail::multiply_rows_of<C>(w, first + i, count, depth, block, b, target);
    else
      detail::multiply_columns_of<C>(w, w_rows, first + i, count, depth, block, b, target);
  }
}

// ---- rows in and out of panels --------------------------------------------------------------------------------------

// Rows [first, first + block.rows) of x as panels.
template <class C>
void pack_lanes(const ExpertRows& x, int64_t first, int64_t depth, const LaneBlock<C>& block, C* out) {
  constexpr int L = Vec<C>::size;
  with_matrix<C>({x.dtype, x.data, x.row_stride, x.col_stride}, 0, 0, [&](auto* source) {
    using T = std::decay_t<decltype(*source)>;
    auto row = [&](int64_t r) { return source + (x.gather ? int64_t(x.gather[r]) : r) * x.row_stride; };
    for (int64_t panel = 0; panel < block.panels(); ++panel) {
      const int64_t start = panel * block.kWide, width = block.width(panel);
      const int count = int(block.count(panel));
      auto lane = [&](int i) -> const T* { return row(first + start + i); };
      C* target = out + start * depth;
      if (x.col_stride != 1) {
        for (int64_t k = 0; k < depth; ++k)
          for (int i = 0; i < width; ++i) target[k * width + i] = i < count ? C(widen(lane(i)[k * x.col_stride])) : C(0);
      } else if (width == block.kWide) {
        detail::pack_deep_panel<2 * L, C, T>(lane, count, depth, target);
      } else {
        detail::pack_deep_panel<L, C, T>(lane, count, depth, target);
      }
    }
  });
}

namespace detail {

// out[i * out_stride + j] = in[j * in_stride + i] for i, j < kSquare.
#if defined(__AVX512F__)
template <class C>
constexpr int64_t kSquare = std::is_same_v<C, float> ? 16 : 4;

inline void transpose_square(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(in + i * in_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // r[i + j], 128 bits q: column 4 q + j of rows i ... i + 3
    r[i] = low(t[i], t[i + 2]);
    r[i + 1] = high(t[i], t[i + 2]);
    r[i + 2] = low(t[i + 1], t[i + 3]);
    r[i + 3] = high(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 even_a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), even_b = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    const __m512 odd_a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd), odd_b = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
    _mm512_storeu_ps(out + j * out_stride, _mm512_shuffle_f32x4(even_a, even_b, 0x88));
    _mm512_storeu_ps(out + (4 + j) * out_stride, _mm512_shuffle_f32x4(odd_a, odd_b, 0x88));
    _mm512_storeu_ps(out + (8 + j) * out_stride, _mm512_shuffle_f32x4(even_a, even_b, 0xdd));
    _mm512_storeu_ps(out + (12 + j) * out_stride, _mm512_shuffle_f32x4(odd_a, odd_b, 0xdd));
  }
}
#else
template <class C>
constexpr int64_t kSquare = 4;

inline void transpose_square(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
#if defined(__SSE2__)
  __m128 r0 = _mm_loadu_ps(in), r1 = _mm_loadu_ps(in + in_stride);
  __m128 r2 = _mm_loadu_ps(in + 2 * in_stride), r3 = _mm_loadu_ps(in + 3 * in_stride);
  _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
  _mm_storeu_ps(out, r0);
  _mm_storeu_ps(out + out_stride, r1);
  _mm_storeu_ps(out + 2 * out_stride, r2);
  _mm_storeu_ps(out + 3 * out_stride, r3);
#else
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i) out[i * out_stride + j] = in[j * in_stride + i];
#endif
}
#endif
inline void transpose_square(const double* in, int64_t in_stride, double* out, int64_t out_stride) {
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i) out[i * out_stride + j] = in[j * in_stride + i];
}

}  // namespace detail

// The transpose of values [columns][width], its first `rows` lanes, as rows: out[i * out_stride + j].
template <class C>
void store_rows(const C* values, int64_t width, int64_t rows, int64_t columns, C* out, int64_t out_stride) {
  constexpr int64_t S = detail::kSquare<C>;
  const int64_t whole_rows = rows / S * S, whole_columns = columns / S * S;
  for (int64_t i = 0; i < whole_rows; i += S)
    for (int64_t j = 0; j < whole_columns; j += S)
      detail::transpose_square(values + j * width + i, width, out + i * out_stride + j, out_stride);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j)
      out[i * out_stride + j] = values[j * width + i];
}

// ---- experts --------------------------------------------------------------------------------------------------------

// Some rows of one expert: a task. Blocks start at a multiple of kWide rows of the expert.
struct RowBlock {
  int64_t expert, first, rows;
};

// The rows of experts [begin, end) in blocks of at most `most` rows (a multiple of kWide), the longest first.
template <class C>
std::vector<RowBlock> row_blocks(const ExpertOffsets& groups, int64_t begin, int64_t end, int64_t most) {
  std::vector<RowBlock> blocks;
  for (int64_t e = begin; e < end; ++e) {
    const int64_t first = groups.offsets[e], rows = groups.offsets[e + 1] - first;
    const int64_t parts = (rows + most - 1) / most;
    if (parts == 0) continue;
    const int64_t size = round_up((rows + parts - 1) / parts, LaneBlock<C>::kWide);  // blocks of one size
    for (int64_t r = 0; r < rows; r += size) blocks.push_back({e, first + r, std::min(size, rows - r)});
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const RowBlock& a, const RowBlock& b) { return a.rows > b.rows; });
  return blocks;
}

inline Matrix matrix_of(const ExpertMatrices& w, int64_t expert) {
  return {w.dtype, static_cast<const char*>(w.data) + expert * w.expert_stride * item_size(w.dtype), w.row_stride, w.col_stride};
}

inline Matrix transposed(const Matrix& w) { return {w.dtype, w.data, w.col_stride, w.row_stride}; }

}  // namespace pyfast
