// Sorting the slots of a mixture of experts by (expert, slot): a stable counting sort.
//
// Slots are cut into chunks. Each chunk counts its slots per expert; a prefix sum over (expert, chunk) gives the first
// row of every chunk's share of every expert; each chunk then places its slots. A stable sort has one result only, so the
// maps are the same bits however many chunks and threads there are.
#include <algorithm>

#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace pyfast {
namespace {

constexpr int64_t kChunk = 16384;  // slots that are worth a thread of their own

struct Chunks {
  int64_t count, tokens;  // tokens of each but the last

  explicit Chunks(const RowMap& a) {
    const int64_t slots = a.tokens * a.k;
    // A chunk costs a pass over the experts: it should have more slots than that.
    const int64_t least = std::max(kChunk, 4 * a.num_experts);
    count = std::max<int64_t>(1, std::min<int64_t>(a.threads, slots / least));
    tokens = (a.tokens + count - 1) / count;
  }
  int64_t begin(int64_t chunk) const { return chunk * tokens; }
  int64_t end(int64_t chunk, int64_t all) const { return std::min(all, (chunk + 1) * tokens); }
};

template <class Id>
PF_INLINE const Id* ids_of(const RowMap& a, int64_t token) {
  return static_cast<const Id*>(a.experts) + token * a.token_stride;
}

// Counts of the experts among tokens [begin, end); the first slot whose id is not allowed, or -1.
template <class Id>
int64_t count_experts(const RowMap& a, int64_t begin, int64_t end, int32_t* counts) {
  std::fill(counts, counts + a.num_experts, 0);
  for (int64_t t = begin; t < end; ++t) {
    const Id* ids = ids_of<Id>(a, t);
    for (int64_t k = 0; k < a.k; ++k) {
      const int64_t expert = ids[k * a.k_stride];
      if (uint64_t(expert) < uint64_t(a.num_experts))
        ++counts[expert];
      else if (expert != -1)
        return t * a.k + k;
    }
  }
  return -1;
}

// counts [chunks, E] become the first row of each chunk's share of each expert.
void first_rows(const RowMap& a, int64_t chunks, int32_t* counts) {
  int32_t row = 0;
  for (int64_t e = 0; e < a.num_experts; ++e) {
    a.offsets[e] = row;
    for (int64_t c = 0; c < chunks; ++c) {
      int32_t& entry = counts[c * a.num_experts + e];
      const int32_t count = entry;
      entry = row;
      row += count;
    }
  }
  a.offsets[a.num_experts] = row;
}

template <class Id>
void place(const RowMap& a, int64_t begin, int64_t end, int32_t* next) {
  for (int64_t t = begin; t < end; ++t) {
    const Id* ids = ids_of<Id>(a, t);
    for (int64_t k = 0; k < a.k; ++k) {
      const int64_t expert = ids[k * a.k_stride], s = t * a.k + k;
      if (expert < 0) {
        a.inverse[s] = -1;
        continue;
      }
      const int32_t row = next[expert]++;
      a.gather[row] = int32_t(t);
      a.slot[row] = int32_t(s);
      a.inverse[s] = row;
    }
  }
}

template <class Id>
int64_t sort_slots(const RowMap& a) {
  static thread_local Scratch count_scratch, bad_scratch;
  const Chunks chunks(a);
  int32_t* counts = count_scratch.get<int32_t>(chunks.count * a.num_experts);  // [chunks, E]
  int64_t* bad = bad_scratch.get<int64_t>(chunks.count);
  parallel_tasks(chunks.count, a.threads, [&](int64_t c, int) {
    bad[c] = count_experts<Id>(a, chunks.begin(c), chunks.end(c, a.tokens), counts + c * a.num_experts);
  });
  for (int64_t c = 0; c < chunks.count; ++c)
    if (bad[c] >= 0) return bad[c];
  first_rows(a, chunks.count, counts);
  parallel_tasks(chunks.count, a.threads, [&](int64_t c, int) {
    place<Id>(a, chunks.begin(c), chunks.end(c, a.tokens), counts + c * a.num_experts);
  });
  const int64_t used = a.offsets[a.num_experts], slots = a.tokens * a.k;
  std::fill(a.gather + used, a.gather + slots, -1);
  std::fill(a.slot + used, a.slot + slots, -1);
  return -1;
}

}  // namespace

int64_t row_map(const RowMap& a) { return a.wide ? sort_slots<int64_t>(a) : sort_slots<int32_t>(a); }

bool tile_list(const TileList& a) {
  int64_t tile = 0;
  for (int64_t e = 0; e < a.num_experts; ++e) {
    for (int64_t row = a.offsets[e]; row < a.offsets[e + 1]; row += a.block, ++tile) {
      if (tile == a.bound) return false;
      a.tiles[2 * tile] = int32_t(e);
      a.tiles[2 * tile + 1] = int32_t(row);
    }
  }
  *a.count = int32_t(tile);
  std::fill(a.tiles + 2 * tile, a.tiles + 2 * a.bound, -1);
  return true;
}

}  // namespace pyfast
