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
// bfloat16 weights and rows stay so where the processor multiplies pairs of them (bf16_pair.h): E is what operands are
// made of, C what sums are kept in, and the depth of a panel is counted in steps, of E.
//
// An element of a product is one chain of fmas over depth in blocks of kLaneDepth (kColumnDepth) steps: its bits depend neither
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
template <class C, int ROWS, int NV, bool PACKED, class E>
void lane_kernel(int64_t depth, const E* __restrict a, int64_t a_stride, const E* __restrict b, C* __restrict c,
                 int64_t c_stride, bool accumulate, Ahead ahead) {
  constexpr int L = Vec<C>::size;
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
  const E* base[kPointers];
#pragma GCC unroll 4
  for (int g = 0; g < kPointers; ++g) base[g] = PACKED ? a : a + 3 * g * a_stride;
  auto step = [&]() __attribute__((always_inline)) {
    decltype(operands(b)) bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = operands(b + v * L);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const auto av = repeated(PACKED ? a + r : base[r / 3] + (r % 3) * a_stride);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) add_products<C>(sum[r][v], av, bv[v]);
    }
    b += NV * L;
    if constexpr (PACKED) {
      a += Tile<C>::rows;
    } else {
#pragma GCC unroll 4
      for (int g = 0; g < kPointers; ++g) ++base[g];
    }
  };
  if constexpr (std::is_same_v<E, bf16_pair>) {  // one loop: in two, GCC keeps the sums of assembly in memory
    const int64_t ahead_step = ahead.step / kAheadSteps;
    for (int64_t k = 0; k < depth; ++k) {
      if constexpr (PACKED) {
        __builtin_prefetch(ahead.next, 0, 2);
        ahead.next += ahead_step;
      }
      step();
    }
  } else {
    for (int64_t k = 0; k < depth;) {
      if constexpr (PACKED) {
        __builtin_prefetch(ahead.next, 0, 2);
        __builtin_prefetch(ahead.next + 64, 0, 2);
        __builtin_prefetch(ahead.next + 128, 0, 2);
        ahead.next += ahead.step;
      }
      for (const int64_t end = std::min(depth, k + kAheadSteps); k < end; ++k) step();
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r, c += c_stride)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(c + v * L, accumulate ? load(c + v * L) + sum[r][v] : sum[r][v]);
}

// A tile of weight rows as lane_kernel reads it.
template <class E>
struct TileA {
  const E* data;
  int64_t stride;
  bool packed;
};

// Whether there is a kernel of exactly that many rows, which reads and writes no row beyond them.
template <class C>
constexpr bool is_whole_tile(int64_t rows) {
  constexpr int MR = Tile<C>::rows;
  return rows == MR || rows == MR * 2 / 3 || rows == MR / 3;
}

template <class C, int NV, bool PACKED, class E>
PF_INLINE void lane_kernel_for(int64_t rows, int64_t depth, const E* a, int64_t a_stride, const E* b, C* c,
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
template <class C, class E>
PF_INLINE void multiply_tile(int64_t rows, int64_t depth, const TileA<E>& a, int64_t width, const E* b, C* c,
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
#if defined(__AVX512F__)
template <class E, class T, class Row>
void pack_columns(Row&& row, int64_t lanes, int64_t depth, bf16_pair* out, int64_t tile_stride) {
  pack_wide_pairs<Tile<float>::rows, T>(row, lanes, depth, out, tile_stride);
}
#endif

}  // namespace detail

inline int64_t item_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

namespace detail {

// A row of weights as operands.
template <class C, class T>
PF_INLINE void operand_row(const T* in, int64_t depth, C* out) {
  widen_run(in, depth, out);
}
#if defined(__AVX512F__)
template <class E, class T>
PF_INLINE void operand_row(const T* in, int64_t depth, bf16_pair* out) {
  for (int64_t k = 0; k < depth; k += 32, out += 16) {
    const int64_t count = depth - k;
    const __m256i low = halves_upto(in + k, count), high = halves_upto(in + k + (count > 16 ? 16 : 0), count - 16);
    const __m512i pairs = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    _mm512_mask_storeu_epi32(out, count > 30 ? __mmask16(0xffff) : __mmask16((1u << ((count + 1) / 2)) - 1), pairs);
  }
}
#endif

// Whether `rows` rows of contiguous weights can be read where they lie.
template <class E, class T>
bool lies_ready(const Matrix& w, int64_t rows, int64_t depth) {
  if (!is_whole_tile<sum_t<E>>(rows)) return false;
  if (std::is_same_v<E, bf16_pair>) return std::is_same_v<T, bf16> && w.row_stride % 2 == 0 && depth % 2 == 0;
  return std::is_same_v<T, E>;
}

}  // namespace detail

// Rows [first, first + rows) of w, depth [p, p + depth), as tiles[0 ...]; `scratch` holds kGroup x kLaneDepth elements.
template <class E>
void weight_tiles(const Matrix& w, int64_t first, int64_t rows, int64_t p, int64_t depth, E* scratch, TileA<E>* tiles) {
  constexpr int64_t MR = Tile<sum_t<E>>::rows, N = kValues<sum_t<E>, E>;
  const int64_t steps = steps_of<E>(depth);
  with_matrix<E>(w, first, p, [&](auto* source) {
    using T = std::decay_t<decltype(*source)>;
    for (int64_t t = 0, i = 0; i < rows; ++t, i += MR, scratch += MR * steps) {
      const int64_t count = std::min(MR, rows - i);
      if (w.col_stride == 1) {
        if (detail::lies_ready<E, T>(w, count, depth)) {
          tiles[t] = {reinterpret_cast<const E*>(source + i * w.row_stride), w.row_stride / N, false};
          continue;
        }
        for (int64_t r = 0; r < MR; ++r) {
          if (r < count)
            detail::operand_row<E>(source + (i + r) * w.row_stride, depth, scratch + r * steps);
          else
            std::fill_n(scratch + r * steps, steps, E{});
        }
        tiles[t] = {scratch, steps, false};
      } else {
        pack_a<E>(source + i * w.row_stride, w.row_stride, w.col_stride, count, depth, scratch);
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
template <class C, class E>
void multiply_rows_of(const Matrix& w, int64_t first, int64_t rows, int64_t depth, const LaneBlock<C>& block, const E* b,
                      const LaneSums<C>& sums) {
  static thread_local Scratch memory;
  constexpr int64_t MR = Tile<C>::rows, N = kValues<C, E>;
  const int64_t all_steps = steps_of<E>(depth);
  E* scratch = memory.get<E>(kGroup<C> * kLaneDepth);
  TileA<E> tiles[4];
  for (int64_t p = 0; p < all_steps; p += kLaneDepth) {
    const int64_t steps = std::min(kLaneDepth, all_steps - p);
    weight_tiles<E>(w, first, rows, p * N, std::min(steps * N, depth - p * N), scratch, tiles);
    for (int64_t t = 0; t * MR < rows; ++t)
      for (int64_t panel = 0; panel < block.panels(); ++panel) {
        const int64_t width = block.width(panel), start = panel * block.kWide;
        multiply_tile<C>(std::min(MR, rows - t * MR), steps, tiles[t], width, b + start * all_steps + p * width,
                         sums.at(start, width, t * MR), width, p > 0, {reinterpret_cast<const char*>(b), 0});
      }
  }
}

// multiply_lanes for weights whose columns are contiguous: the next block of them is asked for while one is computed.
template <class C, class E>
void multiply_columns_of(const Matrix& w, int64_t w_rows, int64_t first, int64_t rows, int64_t depth,
                         const LaneBlock<C>& block, const E* b, const LaneSums<C>& sums) {
  static thread_local Scratch memory;
  constexpr int64_t MR = Tile<C>::rows, kTile = kColumnDepth * MR + 64 / sizeof(E);  // no power of two apart
  constexpr int64_t kValuesDeep = kColumnDepth * kValues<C, E>;
  E* tiles = memory.get<E>(kColumns<C> / MR * kTile);
  const int64_t item = item_size(w.dtype), all_steps = steps_of<E>(depth);
  for (int64_t p = 0; p < depth; p += kValuesDeep) {
    const int64_t kc = std::min(kValuesDeep, depth - p);
    with_matrix<E>(w, first, p, [&](auto* source) {
      using T = std::decay_t<decltype(*source)>;
      pack_columns<E, T>([&](int64_t k) { return source + k * w.col_stride; }, rows, kc, tiles, kTile);
    });
    const bool last = p + kc == depth;
    const int64_t next_row = last ? first + rows : first, next_depth = last ? 0 : p + kc;
    const int64_t next_count = next_row < w_rows ? std::min(kValuesDeep, depth - next_depth) : 0;
    const char* next = static_cast<const char*>(w.data) + (next_row + next_depth * w.col_stride) * item;
    int64_t call = 0;
    for (int64_t panel = 0; panel < block.panels(); ++panel) {
      const int64_t width = block.width(panel), start = panel * block.kWide;
      for (int64_t t = 0; t * MR < rows; ++t, ++call) {
        const Ahead ahead = call < next_count ? Ahead{next + call * w.col_stride * item, 192}
                                              : Ahead{reinterpret_cast<const char*>(tiles), 0};
        multiply_tile<C>(std::min(MR, rows - t * MR), steps_of<E>(kc), TileA<E>{tiles + t * kTile, MR, true}, width,
                         b + start * all_steps + steps_of<E>(p) * width, sums.at(start, width, t * MR), width, p > 0, ahead);
      }
    }
  }
}

}  // namespace detail

// sums [panel][group][width] = rows [first, first + rows) of w [w_rows, depth], rows <= group, times the panels b. `group`
// is a multiple of the tile's rows.
template <class C, class E>
void multiply_lanes(const Matrix& w, int64_t w_rows, int64_t first, int64_t rows, int64_t depth,
                    const LaneBlock<C>& block, const E* b, C* sums, int64_t group) {
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

namespace detail {

template <int W, class T, class C, class Lane>
void pack_lanes_deep(Lane&& lane, int lanes, int64_t depth, C* out) {
  pack_deep_panel<W, C, T>(lane, lanes, depth, out);
}
#if defined(__AVX512F__)
template <int W, class T, class Lane>
void pack_lanes_deep(Lane&& lane, int lanes, int64_t depth, bf16_pair* out) {
  pack_deep_pairs<W, T>(lane, lanes, depth, out);
}
#endif

}  // namespace detail

// Rows [first, first + block.rows) of x as panels.
template <class C, class E>
void pack_lanes(const ExpertRows& x, int64_t first, int64_t depth, const LaneBlock<C>& block, E* out) {
  constexpr int L = Vec<C>::size;
  with_matrix<E>({x.dtype, x.data, x.row_stride, x.col_stride}, 0, 0, [&](auto* source) {
    using T = std::decay_t<decltype(*source)>;
    auto row = [&](int64_t r) { return source + (x.gather ? int64_t(x.gather[r]) : r) * x.row_stride; };
    for (int64_t panel = 0; panel < block.panels(); ++panel) {
      const int64_t start = panel * block.kWide, width = block.width(panel);
      const int count = int(block.count(panel));
      auto lane = [&](int i) -> const T* { return row(first + start + i); };
      E* target = out + start * steps_of<E>(depth);
      if (x.col_stride != 1) {  // and no gather
        if (width == block.kWide)
          detail::pack<2 * L, E, T>(lane(0), x.row_stride, x.col_stride, count, depth, target);
        else
          detail::pack<L, E, T>(lane(0), x.row_stride, x.col_stride, count, depth, target);
      } else if (width == block.kWide) {
        detail::pack_lanes_deep<2 * L, T>(lane, count, depth, target);
      } else {
        detail::pack_lanes_deep<L, T>(lane, count, depth, target);
      }
    }
  });
}

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

// Rows of `columns` pairs, from a panel of them [columns][width].
inline void store_rows(const bf16_pair* values, int64_t width, int64_t rows, int64_t columns, bf16_pair* out,
                       int64_t out_stride) {
  store_rows<float>(reinterpret_cast<const float*>(values), width, rows, columns, reinterpret_cast<float*>(out), out_stride);
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
