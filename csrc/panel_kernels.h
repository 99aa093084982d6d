// A matrix product whose rows arrive from, or leave for, other processes while it runs. Included by kernels.h.
#pragma once

namespace pyfast {

struct Flag;
struct Peer;

// What belongs to one rank in a PanelGemm.
struct PanelRank {
  const void* a;  // first row of the factor that its panels index
  Flag* arrives;  // its rows may be read once this has reached `epoch`; null: at once
  Flag* leaves;   // raised to `epoch` when all its panels are done; null: nobody waits for them
};

// out (+)= A B panel after panel, B [k, n] packed once: panels [count, 4] are (rank, row in ranks[rank].a, row of out,
// rows), taken in this order. dtypes as in Gemm; columns of A and out are contiguous.
struct PanelGemm {
  DType a_dtype, b_dtype, out_dtype;
  const PanelRank* ranks;
  const Peer* peers;  // one for each rank
  int64_t rank_count;
  const int64_t* panels;
  int64_t count;
  int64_t a_row_stride;
  const void* b;
  int64_t b_row_stride, b_col_stride;
  void* out;
  int64_t out_row_stride, n, k;
  bool accumulate;
  uint32_t epoch;
  double timeout_s;
  int threads;
};

}  // namespace pyfast
