// How routing cuts its tokens into tasks: blocks of one scope, of a size that depends on the shape only, in token order.
#pragma once
#include <algorithm>
#include <vector>

#include "../kernels.h"

namespace pyfast {
namespace route {

struct Block {
  int64_t begin, end;
  int64_t scope;  // -1: tokens outside all scopes, padding
};

inline std::vector<Block> blocks_of(const Route& a) {
  const int64_t size = std::max<int64_t>(16, std::min<int64_t>(512, 16384 / std::max<int64_t>(1, a.experts)));
  std::vector<Block> blocks;
  auto cut = [&](int64_t begin, int64_t end, int64_t scope) {
    for (; begin < end; begin += size) blocks.push_back({begin, std::min(begin + size, end), scope});
  };
  if (!a.starts) {
    cut(0, a.tokens, 0);
    return blocks;
  }
  cut(0, a.starts[0], -1);
  for (int64_t scope = 0; scope < a.scopes; ++scope) cut(a.starts[scope], a.starts[scope + 1], scope);
  cut(a.starts[a.scopes], a.tokens, -1);
  return blocks;
}

}  // namespace route
}  // namespace pyfast
